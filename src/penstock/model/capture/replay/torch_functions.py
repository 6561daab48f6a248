"""Torch functions: those that read data, create tensors, or only query properties such as the shape of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Function = Callable[..., Any]


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


def makes_tensors(function: Function) -> bool:
    """Return whether a function creates new tensors, on a device that is an argument."""
    return function in _makers()


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
