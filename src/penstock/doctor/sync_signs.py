"""Signs: by what an operation shows that the host waits for the device in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from penstock.doctor.finding_kinds import Kind
from penstock.doctor.gpu_tensors import Where
from penstock.report.units import show_bytes

__all__ = ["Sign", "launches", "read_sign", "tensors_of"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Sign:
    """What an operation was found to do; `is_wait` says if the device has nothing left to do when it is done."""

    kind: Kind
    detail: str = ""
    is_wait: bool = True


@dataclass(frozen=True)
class _Ran:
    """An operation that ran."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    out: Any
    where: Where

    def argument(self, position: int, name: str) -> Any:  # noqa: ANN401 - a tensor, a number, a list
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    @property
    def has_device_input(self) -> bool:
        return any(self.where.is_on_device(tensor) for tensor in tensors_of((self.args, self.kwargs)))


def read_sign(func: object, args: Sequence[Any], kwargs: Mapping[str, Any], out: object, where: Where) -> Sign | None:
    """Return what an operation that ran was found to do, if it is one that waits."""
    packet = getattr(func, "overloadpacket", None)  # operations of a higher order have none
    reader = _READERS.get(packet)
    return reader(_Ran(args, kwargs, out, where)) if reader else None


def launches(func: object) -> bool:
    """Does an operation give the device something to do? Views and memory without content do not."""
    return not getattr(func, "is_view", False) and getattr(func, "overloadpacket", None) not in _IDLE


def tensors_of(values: object) -> list[torch.Tensor]:
    """Return the tensors of arguments or results, also those in lists."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


# ---- what each operation shows


def _of_kind(kind: Kind) -> Callable[[_Ran], Sign | None]:
    return lambda ran: Sign(kind) if ran.has_device_input else None


def _repeat(ran: _Ran) -> Sign | None:
    if ran.kwargs.get("output_size") is not None or not ran.has_device_input:
        return None
    return Sign(Kind.SHAPE)


def _read_by_mask(ran: _Ran) -> Sign | None:
    return Sign(Kind.SHAPE) if _has_mask(ran.args[1]) and ran.has_device_input else None


def _write_by_mask(ran: _Ran) -> Sign | None:
    value = ran.argument(2, "values")
    is_number = value.numel() == 1 and not ran.where.is_on_device(value)  # torch fills by the mask, with no wait
    return None if is_number else _read_by_mask(ran)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _constant(ran: _Ran) -> Sign | None:
    """Read torch.tensor(..., device=): its copy is made with no mode in sight, and what is shown is where it ended."""
    made = ran.args[0]
    return Sign(Kind.UNPINNED, _size(made)) if ran.where.is_on_device(made) else None


def _size(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {show_bytes(tensor.numel() * tensor.element_size())}"


def _converted(ran: _Ran) -> Sign | None:
    return _copy(ran.where, ran.args[0], ran.out, may_go_on=bool(ran.kwargs.get("non_blocking")))


def _copied(ran: _Ran) -> Sign | None:
    return _copy(ran.where, ran.args[1], ran.args[0], may_go_on=bool(ran.argument(2, "non_blocking")))


def _copy(where: Where, source: torch.Tensor, target: torch.Tensor, *, may_go_on: bool) -> Sign | None:
    """Return what a copy shows: one within the host or the device is none of our business."""
    is_from, is_to = where.is_on_device(source), where.is_on_device(target)
    if is_from == is_to:
        return None
    if is_from:
        return None if may_go_on and where.is_pinned(target) else Sign(Kind.TO_HOST, _size(source))
    if not where.is_pinned(source):
        return Sign(Kind.UNPINNED, _size(source), is_wait=not may_go_on)
    return None if may_go_on else Sign(Kind.BLOCKING, _size(source))


_READERS: dict[object, Callable[[_Ran], Sign | None]] = {
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
