"""Modes: put a model into training or evaluation for a while, and back exactly as it was; likewise random states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.devices import cuda

__all__ = ["RandomStates", "in_mode"]


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into a mode, unless it is in it: then modules that were set apart from it stay as they are."""
    before = [(module, module.training) for module in model.modules()]
    if model.training != training:
        model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


class RandomStates:
    """All random states at one moment, to go back to."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._gpus = cuda.random_states()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def have_others_changed(self) -> bool:
        """Return whether random numbers were drawn that torch knows nothing of: Python's or numpy's."""
        now: Any = np.random.get_state()
        same = now[2:] == self._numpy[2:] and bool(np.array_equal(now[1], self._numpy[1]))
        return random.getstate() != self._python or not same

    def restore(self) -> None:
        """Go back."""
        torch.set_rng_state(self._torch)
        cuda.set_random_states(self._gpus)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
