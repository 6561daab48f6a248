"""Gradient mode: a decorator that turns gradients off."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_gradients(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function without gradients, and outside of inference mode.

    The function may create objects that are kept, such as the program for evaluation. Inference tensors could not be
    used in them later.
    """
    return torch.no_grad()(torch.inference_mode(False)(function))
