"""Modes: put a model into training or evaluation for a while, and back exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["in_mode"]


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
