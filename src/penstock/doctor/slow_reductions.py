"""Slow reductions: reductions over a dimension that is not the innermost in memory, found by strides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.report.units import show_seconds
from penstock.timing import measure

aten = torch.ops.aten

_LEAST_BYTES = 2**20  # smaller reductions take too little time
_MOST_BYTES = 2**30  # larger tensors are not copied for a trial
_LEAST_GAIN = 1.2  # the smallest speed-up to report

_OPERATIONS = {
    aten.sum, aten.mean, aten.prod, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.any,
    aten.all, aten.var, aten.std, aten.var_mean, aten.std_mean, aten.logsumexp, aten.linalg_vector_norm,
    aten._softmax, aten._log_softmax,
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """A reduction over the dimensions `dims` of a tensor, with enough data to run it again."""

    func: Any
    position: int
    dims: tuple[int, ...]
    rest: tuple[Any, ...]
    named: Mapping[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        name = self.func.overloadpacket.__name__.strip("_")
        over = ", ".join(map(str, self.dims))
        return f"{name} over dim {over} of {self.shape}, strides {self.stride}"

    def try_out(self) -> str | None:
        """Return its time now and over the innermost dimensions, as text; None if that is not faster."""
        if math.prod(self.shape) * self.dtype.itemsize > _MOST_BYTES:
            return ""
        try:
            given = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()
            ends = tuple(range(-len(self.dims), 0))
            moved = given.movedim(self.dims, ends).contiguous()
            now = measure(self._run, given, self.dims, repeats=5).median
            then = measure(self._run, moved, ends, repeats=5).median
        except torch.OutOfMemoryError:
            return ""
        if now < _LEAST_GAIN * then:
            return None
        return f"takes {show_seconds(now, digits=3)}, with that dimension innermost {show_seconds(then, digits=3)}"

    def _run(self, tensor: torch.Tensor, dims: tuple[int, ...]) -> object:
        """Run the operation with other dimensions, in the form of the original argument."""
        rest, named = list(self.rest), dict(self.named)
        was = named["dim"] if "dim" in named else rest[self.position - 1]
        given = list(dims) if isinstance(was, (list, tuple)) else dims[0]
        if "dim" in named:
            named["dim"] = given
        else:
            rest[self.position - 1] = given
        return self.func(tensor, *rest, **named)


def find_reduction(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reduction | None:  # noqa: ANN401 - an operation
    """Return the reduction of an operation if it is large and its dimensions are not the innermost in memory."""
    if getattr(func, "overloadpacket", None) not in _OPERATIONS or not args or not isinstance(args[0], torch.Tensor):
        return None
    tensor = args[0]
    if tensor.numel() * tensor.element_size() < _LEAST_BYTES:
        return None
    position = next((k for k, argument in enumerate(func._schema.arguments) if argument.name == "dim"), 0)
    given = kwargs.get("dim", args[position] if 0 < position < len(args) else None)
    dims = _dims(given, tensor.dim())
    if not dims or not _is_strided(tensor, dims):
        return None
    return Reduction(
        func, position, dims, tuple(args[1:]), dict(kwargs),
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
    )  # fmt: skip


def _dims(given: object, rank: int) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given % rank,) if rank else ()
    return tuple(sorted(dim % rank for dim in given)) if isinstance(given, (list, tuple)) and rank else ()


def _is_strided(tensor: torch.Tensor, dims: tuple[int, ...]) -> bool:
    """Return whether neighbours in memory belong to different results; expanded or complete reductions do not count."""
    real = [dim for dim in range(tensor.dim()) if tensor.shape[dim] > 1]
    reduced = set(dims) & set(real)
    if not reduced or reduced == set(real) or any(tensor.stride(dim) == 0 for dim in real):
        return False
    return min(real, key=tensor.stride) not in reduced
