"""Plain: a model that runs as it is, in evaluation, whatever mode it is in."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from penstock.model.preserve.modes import in_mode

__all__ = ["Plain"]

# of each module: to run it in evaluation is to change its mode for a while, whoever else does the same
_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_LOCKING = threading.Lock()


class Plain:
    """A model as it is, in evaluation and without gradients; one call at a time.

    A model that is in evaluation already is called, and that is all: to go through its modules takes longer than a
    small model does.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self._locks = model, _locks_of(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the model
        """Return what the model returns."""
        if len(self._locks) == 1:
            with self._locks[0]:
                return self._run(args, kwargs)
        with ExitStack() as around:
            for lock in self._locks:
                around.enter_context(lock)
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - as the model
        if not self.model.training:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        with torch.no_grad(), in_mode(self.model, training=False):
            return self.model(*args, **kwargs)


def _locks_of(model: nn.Module) -> list[threading.RLock]:
    """Return the locks of a model's modules, in an order that is the same for all: modules may be in several models."""
    with _LOCKING:
        modules = list(model.modules())
        found = {id(lock): lock for module in modules if (lock := _LOCKS.get(module)) is not None}
        locks = [found[number] for number in sorted(found)] or [threading.RLock()]
        for module in modules:
            _LOCKS.setdefault(module, locks[0])
        return locks
