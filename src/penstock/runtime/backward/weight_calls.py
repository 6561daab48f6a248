"""Weight calls: the torch functions that have a weight, in Python and in exported graphs, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.runtime.backward.weight_ops import (
    Convolution,
    Einsum,
    Embedding,
    GroupedProduct,
    Linear,
    Operation,
    Product,
)
from penstock.runtime.backward.weight_sources import Weight, find_weight, is_plain

Arguments = Mapping[str, Any]


class Call(NamedTuple):
    """A call whose weight gradient can be deferred."""

    operation: Operation
    x: Tensor
    weight: Weight
    bias: Tensor | None = None


class Signature(NamedTuple):
    """A function with a weight: the names of its arguments, and the function that reads them."""

    names: tuple[str, ...]
    read: Callable[[Arguments], Call | None]


def read_call(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
    """Return a call whose weight gradient can be deferred, or None if the function must run unchanged."""
    names, read = SIGNATURES[function]
    given: dict[str, Any] = dict(zip(names, args, strict=False))
    if kwargs:
        given.update(kwargs)
    if len(given) != len(args) + len(kwargs) or (kwargs and not given.keys() <= set(names)):
        return None  # unknown arguments; if they are wrong, torch raises
    return read(given)


def _call(operation: Operation, x: object, weight: Weight, bias: object = None) -> Call | None:
    return Call(operation, x, weight, bias) if is_plain(x) and (bias is None or is_plain(bias)) else None


def _linear(given: Arguments) -> Call | None:
    weight = find_weight(given.get("weight"), may_be_computed=True)
    if weight is None or weight.tensor.ndim != 2:
        return None
    return _call(_LINEAR, given.get("input"), weight, given.get("bias"))


_LINEAR = Linear()


def _product(name: str) -> Callable[[Arguments], Call | None]:
    def read(given: Arguments) -> Call | None:
        scales = [given.get("alpha", 1), given.get("beta", 1)]
        factors = _one_weight(given.get("left"), given.get("right"))
        if factors is None or not all(isinstance(scale, (int, float)) for scale in scales):
            return None
        x, weight, is_left = factors
        return _call(Product(name, is_left, *scales), x, weight, given.get("bias"))

    return read


def _one_weight(left: object, right: object) -> tuple[Any, Weight, bool] | None:
    """Return the input, the weight, and whether it is on the left; None unless exactly one factor is a weight."""
    of_left, of_right = find_weight(left, may_be_computed=False), find_weight(right, may_be_computed=False)
    if of_left is None:
        return None if of_right is None else (left, of_right, False)
    return (right, of_left, True) if of_right is None else None  # the product of two weights is a weight too


def _convolution(given: Arguments) -> Call | None:
    weight, x = find_weight(given.get("weight"), may_be_computed=True), given.get("input")
    if weight is None or not is_plain(x) or x.ndim != weight.tensor.ndim or weight.tensor.is_complex():
        return None
    sizes = weight.tensor.shape[2:]
    stride, dilation, output_padding = (
        _each(given.get(name, default), len(sizes))
        for name, default in (("stride", 1), ("dilation", 1), ("output_padding", 0))
    )
    padding = given.get("padding", 0)
    if isinstance(padding, str):
        around = [d * (size - 1) for d, size in zip(dilation, sizes, strict=True)]
        if padding == "same" and any(total % 2 for total in around):
            return None  # the two sides differ: torch pads before it convolves
        padding = [total // 2 for total in around] if padding == "same" else 0
    padding, is_transposed = _each(padding, len(sizes)), given.get("transposed", False)
    operation = Convolution(stride, padding, dilation, is_transposed, output_padding, given.get("groups", 1))
    return _call(operation, x, weight, given.get("bias"))


def _each(setting: int | Sequence[int], count: int) -> list[int]:
    if isinstance(setting, int):
        return [setting] * count
    return list(setting) * count if len(setting) == 1 else list(setting)


def _transposed(given: Arguments) -> Call | None:
    return _convolution({**given, "transposed": True})


def _any_convolution(given: Arguments) -> Call | None:
    return None if torch._C._is_any_autocast_enabled() else _convolution(given)  # cast only on some devices


def _embedding(given: Arguments) -> Call | None:
    weight, index = find_weight(given.get("weight"), may_be_computed=True), given.get("padding_idx")
    if weight is None or weight.tensor.ndim != 2 or given.get("sparse") or given.get("max_norm") is not None:
        return None  # max_norm changes the weight
    is_scaled = given.get("scale_grad_by_freq", False)
    return _call(Embedding(-1 if index is None else index, is_scaled), given.get("input"), weight)


def _functional_embedding(given: Arguments) -> Call | None:
    index, weight = given.get("padding_idx"), given.get("weight")
    if index is not None and index < 0 and isinstance(weight, Tensor):
        return _embedding({**given, "padding_idx": index + weight.shape[0]})  # counted from the end
    return _embedding(given)


def _grouped(given: Arguments) -> Call | None:
    x, offsets, weight = given.get("left"), given.get("offs"), find_weight(given.get("right"), may_be_computed=False)
    if weight is None or not is_plain(x) or not is_plain(offsets):
        return None
    is_by_rows = x.ndim == 2 and weight.tensor.ndim == 3
    has_more = given.get("bias") is not None or given.get("out_dtype") is not None
    return _call(GroupedProduct(offsets), x, weight) if is_by_rows and not has_more else None


def _einsum(given: Arguments) -> Call | None:
    equation, operands = given.get("equation"), given.get("left")
    if not isinstance(operands, (list, tuple)):
        operands = (operands, given.get("right"))
    if len(operands) != 2 or not isinstance(equation, str) or given.get("path") is not None:
        return None
    factors = _one_weight(*operands)
    if factors is None or not is_plain(factors[0]):
        return None
    x, weight, is_left = factors
    operation = _read_equation(equation, x, weight.tensor, is_left)
    return None if operation is None else _call(operation, x, weight)


def _read_equation(equation: str, x: Tensor, weight: Tensor, is_left: bool) -> Einsum | None:
    """Return the Einsum of an equation if each letter recurs with the same size and some are summed; else None."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    factors = inputs.split(",")
    if len(factors) != 2:
        return None
    of_x, of_weight = reversed(factors) if is_left else factors
    if "..." in of_x:
        free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
        spread = "".join(free[: x.ndim - len(of_x) + 3])
        of_x, output = of_x.replace("...", spread), output.replace("...", spread)
    if len(of_x) != x.ndim or len(of_weight) != weight.ndim or "." in of_x + of_weight + output:
        return None
    in_x, in_weight, in_output = set(of_x), set(of_weight), set(output)
    if len(in_x) + len(in_weight) + len(in_output) != len(of_x + of_weight + output):
        return None  # a diagonal
    if in_x ^ in_weight != in_output - (in_x & in_weight) or in_x & in_weight <= in_output:
        return None  # a letter of only one factor is summed, or no letter is summed
    size_of = dict(zip(of_x, x.shape, strict=True))
    if any(size_of.get(letter, size) != size for letter, size in zip(of_weight, weight.shape, strict=True)):
        return None  # one factor is broadcast
    return Einsum(of_x, of_weight, output, is_left)


def _spellings() -> Iterator[tuple[object, Signature]]:
    aten = torch.ops.aten
    yield from _spelled(_linear, "input weight bias", functional.linear, aten.linear)
    for name in ("matmul", "mm", "bmm"):
        functions = (getattr(torch, name), getattr(Tensor, name), getattr(aten, name))
        yield from _spelled(_product(name), "left right", *functions)
    for name in ("addmm", "baddbmm"):
        functions = (getattr(torch, name), getattr(Tensor, name), getattr(aten, name))
        yield from _spelled(_product(name), "bias left right beta alpha", *functions)
    for dims in ("1d", "2d", "3d"):
        names = "input weight bias stride padding dilation groups"
        yield from _spelled(_convolution, names, getattr(torch, f"conv{dims}"), getattr(aten, f"conv{dims}"))
        names, name = "input weight bias stride padding output_padding groups dilation", f"conv_transpose{dims}"
        yield from _spelled(_transposed, names, getattr(torch, name), getattr(aten, name))
    names = "input weight bias stride padding dilation transposed output_padding groups"
    yield from _spelled(_any_convolution, names, aten.convolution)
    names = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
    yield from _spelled(_functional_embedding, names, functional.embedding)
    names = "weight input padding_idx scale_grad_by_freq sparse"
    yield from _spelled(_embedding, names, torch.embedding, aten.embedding)
    yield from _spelled(_einsum, "equation left right path", torch.einsum, aten.einsum)
    yield from _spelled(_grouped, "left right offs bias out_dtype", torch._grouped_mm, aten._grouped_mm)


def _spelled(
    read: Callable[[Arguments], Call | None], names: str, *functions: Callable[..., Any]
) -> Iterator[tuple[object, Signature]]:
    """Yield each function, and each operator overload with the same arguments, together with their spelling."""
    spelling = Signature(tuple(names.split()), read)
    for function in functions:
        yield function, spelling
        for overload in ("default", "padding", "input"):
            if isinstance(function, torch._ops.OpOverloadPacket) and hasattr(function, overload):
                yield getattr(function, overload), spelling


SIGNATURES: Mapping[object, Signature] = MappingProxyType(dict(_spellings()))
