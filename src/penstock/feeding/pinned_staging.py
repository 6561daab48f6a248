"""Staging: host tensors go to GPUs through pinned memory that is used again, on streams that do nothing else.

    a loader's tensor ──①──► pinned slot ──②──► memory of the GPU ──③──► the user's stream

① is done by the worker at once, when the slot's last copy ② is over: the worker sleeps until then, nobody else does.
② is queued on the copy stream, and an event behind it. Tensors that are pinned already begin here.
③ the user's stream waits for that event. The memory is the user's from then on: the allocator uses it again when the
user has let go of it and the user's stream has come that far (`record_stream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.devices.streams import Event, OnStream

__all__ = ["Staging", "is_plain", "mark", "pinned"]

Ready = tuple[torch.device, Event]

_MOST_PLANS = 64
_NUM_SLOTS = 2  # one is filled while the other is copied from
_ALIGNMENT = 64  # bytes: any type of number may begin at a multiple
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # all others do things in their own way


@dataclass(frozen=True)
class _Plan:
    """What is done with all items whose tensors have the same shapes.

    Attributes:
        devices: where each goes; None for those that stay.
        is_direct: which lie in pinned memory of the loader's own.
        places: for each that is staged its place in a slot: offset, bytes, type, shape and stride; None for others.
        num_bytes: of a slot.
    """

    devices: list[torch.device | None]
    is_direct: list[bool]
    places: list[tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]] | None]
    num_bytes: int


@dataclass
class _Slot:
    """Pinned memory for the tensors of one item; `copied` is behind the last copies from it."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: list[Event] = field(default_factory=list)
    _rooms: tuple[_Plan, list[torch.Tensor | None]] | None = None  # of the last plan: mostly it is the next one too

    def rooms(self, plan: _Plan) -> list[torch.Tensor | None]:
        """Return memory for each tensor that is staged."""
        if self._rooms is None or self._rooms[0] is not plan or len(self.memory) < plan.num_bytes:
            if len(self.memory) < plan.num_bytes:
                self.memory = pinned(1 << (plan.num_bytes - 1).bit_length())  # torch takes powers of two anyhow
            self._rooms = plan, [None if place is None else self._room(*place) for place in plan.places]
        return self._rooms[1]

    def _room(
        self, offset: int, num_bytes: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        return self.memory[offset : offset + num_bytes].view(dtype).as_strided(shape, stride)


@dataclass
class Staged:
    """Tensors of an item in host memory, ready to be copied.

    Attributes:
        tensors: in pinned memory where they go to a GPU; others as they are.
        devices: where each goes; None for those that stay.
        wants: which want a gradient.
        slot: where the pinned memory is.
        has_direct: some lie in pinned memory of the loader's own.
    """

    tensors: list[torch.Tensor]
    devices: list[torch.device | None]
    wants: list[bool]
    slot: _Slot
    has_direct: bool


class Staging:
    """The pinned memory and the copy streams of one feed; used by one thread at a time.

    Args:
        devices: the GPUs that tensors go to.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        self._direct: list[Ready] = []
        self._plans: dict[object, _Plan] = {}
        self.clear()

    @property
    def num_bytes(self) -> int:
        """The pinned memory that it holds."""
        return sum(len(slot.memory) for slot in self._slots)

    def clear(self) -> None:
        """Let go of the pinned memory; torch keeps it until copies from it are over."""
        self._slots = deque(_Slot() for _ in range(_NUM_SLOTS))

    def stage(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device | None]) -> Staged:
        """Return tensors in pinned memory, where they go to a GPU; those that cannot go stay as they are."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        for event in slot.copied:
            event.synchronize()
        slot.copied = []
        plan = self._plan(tensors, devices)
        found = [
            tensor if room is None else room.copy_(tensor.detach())
            for tensor, room in zip(tensors, slot.rooms(plan), strict=True)
        ]
        return Staged(found, plan.devices, [tensor.requires_grad for tensor in tensors], slot, any(plan.is_direct))

    def _plan(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device | None]) -> _Plan:
        """Return what to do with tensors; of those that are like others before, the same."""
        signs = [
            (t.shape, t.stride(), t.dtype, t.is_pinned(), t.is_conj(), t.is_neg()) if _can_move(t) else None
            for t in tensors
        ]
        key = (tuple(signs), tuple(devices))
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = _plan_of(tensors, devices)
        return self._plans[key]

    def send(self, staged: Staged) -> tuple[list[torch.Tensor], list[Ready]]:
        """Queue the copies; return where the tensors will be, and for each GPU the event behind its copies."""
        found, ready = list(staged.tensors), []
        for device, stream in self._streams.items():
            mine = [at for at, other in enumerate(staged.devices) if other == device]
            if not mine:
                continue
            with OnStream(stream):
                for at in mine:
                    copied = _copied(staged.tensors[at], device)
                    found[at] = copied.requires_grad_() if staged.wants[at] else copied
            ready.append((device, mark(stream)))
        staged.slot.copied = [event for _, event in ready]
        self._direct = list(ready) if staged.has_direct else []
        return found, ready

    def settle(self) -> None:
        """Wait until the loader may write again to what it gave: pinned memory of its own that is being copied from."""
        for _, event in self._direct:
            event.synchronize()
        self._direct = []


def _plan_of(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device | None]) -> _Plan:
    where = [device if _can_move(tensor) else None for tensor, device in zip(tensors, devices, strict=True)]
    strides = [_dense_stride(t) if d is not None else () for t, d in zip(tensors, where, strict=True)]
    is_direct = [d is not None and _is_ready(t, s) for t, d, s in zip(tensors, where, strides, strict=True)]
    places: list[tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]] | None] = [None] * len(tensors)
    offset = 0
    for at, (tensor, stride) in enumerate(zip(tensors, strides, strict=True)):
        if where[at] is not None and not is_direct[at]:
            size = _num_bytes(tensor)
            places[at] = (offset, size, tensor.dtype, tensor.shape, stride)
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return _Plan(where, is_direct, places, offset)


def mark(stream: torch.cuda.Stream) -> Event:
    """Return an event behind all that a stream has been given; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


def pinned(num_bytes: int) -> torch.Tensor:
    """Return host memory that a GPU copies from by itself."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than numbers in memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a dense tensor on a device, copied there on the current stream."""
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor.detach(), non_blocking=True)


def _can_move(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu"


def _is_ready(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Return whether one copy brings a tensor over as it lies: it is pinned, without gaps, and with its signs."""
    return tensor.is_pinned() and tensor.stride() == stride and not tensor.is_conj() and not tensor.is_neg()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride of a tensor without its gaps and repetitions: channels that come last stay last."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
