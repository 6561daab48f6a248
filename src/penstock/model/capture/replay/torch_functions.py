"""Torch functions: those that read data or only query properties, and runs on holes, the tensors without data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from penstock.model.capture.replay.forward_walk import Args, Function, Kwargs, tensors_in

_META = torch.device("meta")


@cache
def _reads() -> frozenset[Function]:
    tensor = torch.Tensor
    names = ("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "__bool__", "__int__", "__float__",
             "__index__", "__complex__", "__contains__", "__repr__", "__str__", "__format__", "__array__")  # fmt: skip
    methods = {getattr(tensor, name) for name in names if hasattr(tensor, name)}
    return frozenset(methods | {torch.is_nonzero, torch.equal, torch.allclose})


@cache
def _looks() -> frozenset[Function]:
    """Return the functions that query or set properties of a tensor and do not use its data."""
    names = ("size", "dim", "numel", "element_size", "is_floating_point", "is_complex", "is_contiguous", "stride",
             "nelement", "ndimension", "type", "get_device", "is_signed", "is_inference", "__len__", "__hash__",
             "storage_offset", "requires_grad_", "register_hook", "retain_grad", "is_same_size",
             "is_shared")  # fmt: skip
    methods = {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}
    return frozenset(methods | {torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel,
                                torch.result_type, torch.is_same_size})  # fmt: skip


@cache
def _tensor_properties() -> frozenset[Function]:
    """Return the getters of the properties whose values are tensors."""
    names = ("T", "mT", "H", "mH", "data", "real", "imag", "grad")
    return frozenset(getattr(torch.Tensor, name).__get__ for name in names)


@cache
def _makers() -> frozenset[Function]:
    """Return the functions that create new tensors, on a device that is an argument."""
    from torch.utils._device import _device_constructors

    return frozenset(_device_constructors())


@cache
def _data_shaped() -> frozenset[Function]:
    tensor = torch.Tensor
    names = ("nonzero", "masked_select", "unique", "argwhere", "bincount", "unique_consecutive", "histc")
    found = {getattr(owner, name) for owner in (torch, tensor) for name in names if hasattr(owner, name)}
    return frozenset(found)


def reads_data(function: Function) -> bool:
    """Return whether a function reads data of a tensor into Python, where control flow may depend on it."""
    return function in _reads()


def is_plain_result(result: object) -> bool:
    """Return whether a result is a plain value; a function that is not a query must have read data to return one."""
    return isinstance(result, (bool, int, float, complex, str, list)) and not any(
        isinstance(item, torch.Tensor) for item in (result if isinstance(result, list) else ())
    )


def is_query(function: Function) -> bool:
    """Return whether a function only queries or sets properties of a tensor, as most attributes do."""
    return function in _looks() or (
        getattr(function, "__name__", "") == "__get__" and function not in _tensor_properties()
    )


def is_device_question(function: Function) -> bool:
    """Return whether a function queries the device of a tensor."""
    return bool(function == torch.Tensor.device.__get__)


def is_data_shaped(function: Function, args: Sequence[Any]) -> bool:
    """Return whether the shape of a function's result depends on data."""
    if function in _data_shaped():
        return True
    if function in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
        return len(args) == 1 or isinstance(args[1], torch.Tensor)
    if function is torch.where or function is torch.Tensor.where:
        return len(args) == 1
    if function is torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            any(isinstance(bound, torch.Tensor) for bound in (part.start, part.stop, part.step))
            if isinstance(part, slice)
            else isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)
            for part in index
        )
    return False


def hole_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hole with the shape, the strides and the dtype of a tensor."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def run_on_holes(function: Function, args: Args, kwargs: Kwargs, device: torch.device) -> Any:  # noqa: ANN401
    """Run a torch function on holes, which computes shapes without data and without random numbers."""
    args, named = _as_holes(args), {key: _as_holes(value) for key, value in kwargs.items()}
    if function in _makers():
        named["device"] = _META
    elif function in (torch.Tensor.cpu, torch.Tensor.cuda):
        if (function is torch.Tensor.cpu) == (device.type == "cpu"):
            return args[0]  # it is already on this device
        args, named, function = args[:1], {}, torch.Tensor.clone
    return _fresh(function(*args, **named))


def works_on_holes(function: Function, args: Args, kwargs: Kwargs, result: object) -> bool:
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
