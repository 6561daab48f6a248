"""Modes: put a model into training or evaluation temporarily; also save and restore all random states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.devices import cuda


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into a mode temporarily; if it is already in this mode, its submodules keep their own modes."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


class RandomStates:
    """A snapshot of all random states."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._gpus = cuda.random_states()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def have_others_changed(self) -> bool:
        """Return whether Python's or numpy's random numbers were drawn since the snapshot."""
        now: Any = np.random.get_state()
        same = now[2:] == self._numpy[2:] and bool(np.array_equal(now[1], self._numpy[1]))
        return random.getstate() != self._python or not same

    def restore(self) -> None:
        """Restore the snapshot."""
        torch.set_rng_state(self._torch)
        cuda.set_random_states(self._gpus)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
