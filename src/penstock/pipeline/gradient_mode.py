"""Modes: how torch is to behave while a pipeline does something."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_gradients"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function run without gradients; where the user is in inference mode, outside of that.

    What is made once and kept, as the program of a model's evaluation, must not be made of inference tensors.
    """
    return torch.no_grad()(torch.inference_mode(False)(function))
