"""Dispatch watch: a dispatch mode that sees every operation of a thread and of the backwards that it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from penstock.doctor.doctor_report import Kind
from penstock.doctor.gpu_tensors import GpuTensors
from penstock.doctor.sightings import Tally
from penstock.doctor.slow_reductions import find_reduction
from penstock.doctor.source_lines import find_place
from penstock.report.units import show_bytes

aten = torch.ops.aten


class DispatchWatch(TorchDispatchMode):
    """Records operations that wait for the device, and reductions over an outer dimension.

    For operations in torch's own threads, it reports the line of `thread`.
    """

    supports_higher_order_operators = True

    def __init__(self, tally: Tally, where: GpuTensors, thread: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally, self._where, self._thread = tally, where, thread
        self.is_on = True  # if the mode cannot be left, it is switched off

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not look into compiled code: otherwise torch.compile would run it uncompiled, in all threads."""
        return True

    @property
    def is_on_top(self) -> bool:
        """Whether this mode was entered last; only then can it be left."""
        return _get_current_dispatch_mode() is self

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's signature
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        named = kwargs or {}
        if not self.is_on:
            return func(*args, **named)
        inputs = tensors_of((args, named))
        touches = any(map(self._where.is_on_device, inputs))
        begin = time.perf_counter()
        if touches and launches(func):
            self._tally.launched(begin)
        out = func(*args, **named)
        end = time.perf_counter()
        if touches:
            self._where.mark_results(tensors_of(out))
            self._find_reductions(func, args, named)
        sign = read_sign(func, args, named, out, self._where)
        if sign is not None:
            place = find_place(self._thread)
            self._tally.add(sign.kind, place, blocked=end - begin, detail=sign.detail)
            if sign.is_wait:
                self._tally.drained(sign.kind, place, end)
        return out

    def _find_reductions(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401
        reduction = find_reduction(func, args, kwargs)
        is_backward = torch._C._current_autograd_node() is not None  # the user cannot change these
        if reduction is not None and not is_backward:
            self._tally.add(Kind.REDUCTION, find_place(self._thread), detail=str(reduction), reduction=reduction)


# ---- how an operation shows that the host waits for the device in it


@dataclass(frozen=True)
class Sign:
    """What an operation does; `is_wait` says whether the device has no work left afterwards."""

    kind: Kind
    detail: str = ""
    is_wait: bool = True


@dataclass(frozen=True)
class _Call:
    """A completed call of an operation."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    where: GpuTensors

    def argument(self, position: int, name: str) -> Any:  # noqa: ANN401 - a tensor, a number, a list
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    @property
    def has_device_input(self) -> bool:
        return any(self.where.is_on_device(tensor) for tensor in tensors_of((self.args, self.kwargs)))


def read_sign(
    func: object, args: Sequence[Any], kwargs: Mapping[str, Any], out: object, where: GpuTensors
) -> Sign | None:
    """Return the sign of a completed operation, or None if it does not wait."""
    packet = getattr(func, "overloadpacket", None)  # higher-order operators have none
    reader = _READERS.get(packet)
    return reader(_Call(args, kwargs, out, where)) if reader else None


def launches(func: object) -> bool:
    """Return whether an operation gives work to the device; views and uninitialised memory do not."""
    return not getattr(func, "is_view", False) and getattr(func, "overloadpacket", None) not in _IDLE


def tensors_of(values: object) -> list[torch.Tensor]:
    """Return all tensors in arguments or results, including nested lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


# ---- the signs of each operation


def _of_kind(kind: Kind) -> Callable[[_Call], Sign | None]:
    return lambda call: Sign(kind) if call.has_device_input else None


def _repeat(call: _Call) -> Sign | None:
    if call.kwargs.get("output_size") is not None or not call.has_device_input:
        return None
    return Sign(Kind.SHAPE)


def _read_by_mask(call: _Call) -> Sign | None:
    return Sign(Kind.SHAPE) if _has_mask(call.args[1]) and call.has_device_input else None


def _write_by_mask(call: _Call) -> Sign | None:
    value = call.argument(2, "values")
    is_number = value.numel() == 1 and not call.where.is_on_device(value)  # torch fills by the mask, without a wait
    return None if is_number else _read_by_mask(call)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _constant(call: _Call) -> Sign | None:
    """Detect torch.tensor(..., device=): its copy is invisible to the mode, but its result is on the device."""
    made = call.args[0]
    return Sign(Kind.UNPINNED, _size(made)) if call.where.is_on_device(made) else None


def _size(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {show_bytes(tensor.numel() * tensor.element_size())}"


def _converted(call: _Call) -> Sign | None:
    return _copy(call.where, call.args[0], call.out, is_non_blocking=bool(call.kwargs.get("non_blocking")))


def _copied(call: _Call) -> Sign | None:
    return _copy(call.where, call.args[1], call.args[0], is_non_blocking=bool(call.argument(2, "non_blocking")))


def _copy(where: GpuTensors, source: torch.Tensor, target: torch.Tensor, *, is_non_blocking: bool) -> Sign | None:
    """Return the sign of a copy; copies within the host or within the device have none."""
    is_from, is_to = where.is_on_device(source), where.is_on_device(target)
    if is_from == is_to:
        return None
    if is_from:
        return None if is_non_blocking and where.is_pinned(target) else Sign(Kind.TO_HOST, _size(source))
    if not where.is_pinned(source):
        return Sign(Kind.UNPINNED, _size(source), is_wait=not is_non_blocking)
    return None if is_non_blocking else Sign(Kind.BLOCKING, _size(source))


_READERS: dict[object, Callable[[_Call], Sign | None]] = {
    aten._local_scalar_dense: _of_kind(Kind.ITEM),
    aten.equal: _of_kind(Kind.ITEM),
    aten.allclose: _of_kind(Kind.ITEM),
    aten.nonzero: _of_kind(Kind.SHAPE),
    aten.masked_select: _of_kind(Kind.SHAPE),
    aten._unique: _of_kind(Kind.SHAPE),
    aten._unique2: _of_kind(Kind.SHAPE),
    aten.unique_dim: _of_kind(Kind.SHAPE),
    aten.unique_consecutive: _of_kind(Kind.SHAPE),
    aten.unique_dim_consecutive: _of_kind(Kind.SHAPE),
    aten.bincount: _of_kind(Kind.SHAPE),
    aten.repeat_interleave: _repeat,
    aten.index: _read_by_mask,
    aten.index_put: _write_by_mask,
    aten.index_put_: _write_by_mask,
    aten._index_put_impl_: _write_by_mask,
    aten.lift_fresh: _constant,
    aten._to_copy: _converted,
    aten.copy_: _copied,
}

_IDLE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach}
