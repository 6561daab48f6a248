"""Pinned staging: copy host tensors to GPUs through reused pinned memory, on separate copy streams.

    a loader's tensor ──①──► pinned slot ──②──► memory of the GPU ──③──► the user's stream

① The worker copies as soon as the slot's last copy ② is over; only the worker waits for that.
② The copy is queued on the copy stream, followed by an event. Tensors that are already pinned start here.
③ The user's stream waits for that event. The memory then belongs to the user: the allocator reuses it when the user has
released it and the user's stream has reached that point (`record_stream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import Event, OnStream, new_stream

Ready = tuple[torch.device, Event]

_MOST_PLANS = 64
_NUM_SLOTS = 2  # one is filled while the other is copied to the GPU
_ALIGNMENT = 64  # bytes; fits every dtype
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes may override copies


@dataclass(frozen=True)
class _Plan:
    """The layout for all items whose tensors have the same shapes."""

    devices: list[torch.device | None]  # of each tensor; None if it stays
    is_direct: list[bool]  # whether each tensor is already in pinned memory
    # of each staged tensor in a slot: offset, bytes, dtype, shape and stride; None for others
    places: list[tuple[int, int, torch.dtype, torch.Size, tuple[int, ...]] | None]
    num_bytes: int  # the size of a slot


@dataclass
class _Slot:
    """Pinned memory for the tensors of one item; the events in `copied` come after the last copies from it."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    copied: list[Event] = field(default_factory=list)
    _views: tuple[_Plan, list[torch.Tensor | None]] | None = None  # of the last plan, which is usually the next one too

    def views(self, plan: _Plan) -> list[torch.Tensor | None]:
        """Return memory for each staged tensor."""
        if self._views is None or self._views[0] is not plan or len(self.memory) < plan.num_bytes:
            if len(self.memory) < plan.num_bytes:
                self.memory = pinned(1 << (plan.num_bytes - 1).bit_length())  # torch allocates powers of two anyway
            self._views = plan, [None if place is None else self._view(*place) for place in plan.places]
        return self._views[1]

    def _view(
        self, offset: int, num_bytes: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]
    ) -> torch.Tensor:
        return self.memory[offset : offset + num_bytes].view(dtype).as_strided(shape, stride)


@dataclass
class StagedTensors:
    """Tensors of an item in host memory, ready to copy."""

    tensors: list[torch.Tensor]  # pinned if they go to a GPU, otherwise unchanged
    devices: list[torch.device | None]  # of each tensor; None if it stays
    needs_grad: list[bool]  # whether each tensor requires a gradient
    slot: _Slot  # with the pinned memory
    has_direct: bool  # whether some tensors were already in pinned memory


class Staging:
    """The pinned memory and the copy streams of one feed, for some GPUs; used by one thread at a time."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._streams = {device: new_stream(device) for device in devices}
        self._direct: list[Ready] = []
        self._plans: dict[object, _Plan] = {}
        self.clear()

    @property
    def num_bytes(self) -> int:
        """The size of its pinned memory."""
        return sum(len(slot.memory) for slot in self._slots)

    def clear(self) -> None:
        """Release the pinned memory; torch keeps it until all copies from it are over."""
        self._slots = deque(_Slot() for _ in range(_NUM_SLOTS))

    def stage(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device | None]) -> StagedTensors:
        """Copy tensors that go to a GPU to pinned memory; tensors that cannot move stay unchanged."""
        slot = self._slots[0]
        self._slots.rotate(-1)
        for event in slot.copied:
            event.synchronize()
        slot.copied = []
        plan = self._plan(tensors, devices)
        found = [
            tensor if view is None else view.copy_(tensor.detach())
            for tensor, view in zip(tensors, slot.views(plan), strict=True)
        ]
        return StagedTensors(found, plan.devices, [t.requires_grad for t in tensors], slot, any(plan.is_direct))

    def _plan(self, tensors: Sequence[torch.Tensor], devices: Sequence[torch.device | None]) -> _Plan:
        """Return the layout for these tensors; tensors of the same shapes share it."""
        layouts = [
            (t.shape, t.stride(), t.dtype, t.is_pinned(), t.is_conj(), t.is_neg()) if _can_move(t) else None
            for t in tensors
        ]
        key = (tuple(layouts), tuple(devices))
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = _plan_of(tensors, devices)
        return self._plans[key]

    def send(self, staged: StagedTensors) -> tuple[list[torch.Tensor], list[Ready]]:
        """Queue the copies; return the new tensors, and for each GPU the event after its copies."""
        found, ready = list(staged.tensors), []
        for device, stream in self._streams.items():
            mine = [at for at, other in enumerate(staged.devices) if other == device]
            if not mine:
                continue
            with OnStream(stream):
                for at in mine:
                    copied = _copied(staged.tensors[at], device)
                    found[at] = copied.requires_grad_() if staged.needs_grad[at] else copied
            ready.append((device, blocking_event(stream)))
        staged.slot.copied = [event for _, event in ready]
        self._direct = list(ready) if staged.has_direct else []
        return found, ready

    def wait_for_sources(self) -> None:
        """Wait until the loader may overwrite its own pinned memory, which is being copied."""
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
            places[at] = (offset, tensor.nbytes, tensor.dtype, tensor.shape, stride)
            offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return _Plan(where, is_direct, places, offset)


def pinned(num_bytes: int) -> torch.Tensor:
    """Return pinned host memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain dense memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a dense tensor to a device on the current stream."""
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor.detach(), non_blocking=True)


def _can_move(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu"


def _is_ready(tensor: torch.Tensor, stride: Sequence[int]) -> bool:
    """Return whether a tensor can be copied directly: pinned, dense, and without pending conjugation or negation."""
    return tensor.is_pinned() and tensor.stride() == stride and not tensor.is_conj() and not tensor.is_neg()


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the stride of a tensor without gaps and repetitions; channels-last stays channels-last."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
