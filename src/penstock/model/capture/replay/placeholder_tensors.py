"""Placeholder tensors (holes): tensors with a shape and without data, and torch functions run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.model.capture.replay.forward_walk import tensors_in
from penstock.model.capture.replay.torch_functions import makes_tensors

_META = torch.device("meta")


def hole_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hole with the shape, the strides and the dtype of a tensor."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def run_on_holes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> Any:  # noqa: ANN401
    """Run a torch function on holes, which computes shapes without data and without random numbers."""
    args, named = _as_holes(args), {key: _as_holes(value) for key, value in kwargs.items()}
    if makes_tensors(function):
        named["device"] = _META
    elif function in (torch.Tensor.cpu, torch.Tensor.cuda):
        if (function is torch.Tensor.cpu) == (device.type == "cpu"):
            return args[0]  # it is already on this device
        args, named, function = args[:1], {}, torch.Tensor.clone
    return _fresh(function(*args, **named))


def works_on_holes(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> bool:
    """Return whether a function works on holes, and its result has the same shapes and dtypes as with data."""
    try:
        imagined = run_on_holes(function, args, kwargs, torch.device("cpu"))
    except Exception:
        return False
    shapes = [(tuple(t.shape), t.dtype) for t in tensors_in(imagined)]
    return shapes == [(tuple(t.shape), t.dtype) for t in tensors_in(result)]


def _as_holes(thing: Any) -> Any:  # noqa: ANN401
    if isinstance(thing, torch.Tensor):
        return thing if thing.is_meta or _is_wrapped(thing) else hole_like(thing)
    if isinstance(thing, torch.device):
        return _META
    if type(thing) in (list, tuple):
        return type(thing)(_as_holes(item) for item in thing)
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(_as_holes(item) for item in thing))
    if type(thing) is dict:
        return {key: _as_holes(item) for key, item in thing.items()}
    return thing


def _fresh(thing: Any) -> Any:  # noqa: ANN401
    """Replace views, and tensors that are not plain holes, by new holes; only such holes can be filled."""
    if isinstance(thing, torch.Tensor):
        is_fine = thing.is_meta and not thing._is_view() and not thing.requires_grad
        return thing if is_fine or _is_wrapped(thing) or "_penstock_marks" in thing.__dict__ else hole_like(thing)
    if isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields"):
        return type(thing)(_fresh(item) for item in thing)
    return thing


def _is_wrapped(tensor: torch.Tensor) -> bool:
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def describe(tensor: torch.Tensor, given: list[torch.Tensor]) -> list[Any]:
    """Return a description of a result: ["in", i] for the i-th tensor argument, else shape, stride and dtype."""
    for index, other in enumerate(given):
        if tensor is other:
            return ["in", index]
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype).removeprefix("torch.")]


def described(item: list[Any]) -> torch.Tensor:
    """Return a hole from the description of a new tensor."""
    shape, stride, dtype = item
    return torch.empty_strided(tuple(shape), tuple(stride), dtype=getattr(torch, dtype), device="meta")
