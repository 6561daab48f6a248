"""Unchanged model: runs a model without a graph, in evaluation, whatever its mode is."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.model.preserve import in_mode

# one lock per module, because a run in evaluation changes the module's mode temporarily
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKING = threading.Lock()


class UnchangedModel:
    """A model in evaluation and without gradients; one call at a time.

    A model that is already in evaluation is simply called: a pass over its modules takes longer than a small model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._locks = model, _locks_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the model's type
        """Run the model."""
        if len(self._locks) == 1:
            with self._locks[0]:
                return self._run(args, kwargs)
        with ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock)
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - the model's type
        if not self.model.training:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        with torch.no_grad(), in_mode(self.model, training=False):
            return self.model(*args, **kwargs)


def _locks_of(model: nn.Module) -> list[threading.RLock]:
    """Return the locks of a model's modules, in a global order: models may share modules."""
    with _LOCKING:
        modules = list(model.modules())
        found = {id(lock): lock for module in modules if (lock := _LOCKS.get(module)) is not None}
        locks = [found[number] for number in sorted(found)] or [threading.RLock()]
        for module in modules:
            _LOCKS.setdefault(module, locks[0])
        return locks
