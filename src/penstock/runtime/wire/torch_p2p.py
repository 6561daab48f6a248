"""Torch P2P: sends values with torch.distributed's isend and irecv, by gloo on CPUs and by NCCL between GPUs.

The sender announces values over the links, and the receiver then posts its receive. So both ends post in the same
order, as NCCL requires, and the receiver knows the sizes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.devices.kinds import kind_of
from penstock.runtime.wire.messages import Description, Head
from penstock.runtime.wire.transport import Announce, Introduce, Payload

_ANNOUNCEMENT = struct.Struct("<I")  # the tag
_UNUSED_NUMBER = 0  # the number in the head, which this carrier does not use
_TAGS = 1 << 30
_MOST_ON_WAY = 4  # unfinished sends; if there are more, the sending thread waits for the oldest


class TorchP2P:
    """A value carrier that uses sends and receives of torch.distributed; its backend is "gloo" or "nccl"."""

    threaded_bytes = 0
    needs_reader = True

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self._device = backend, device
        self._room = device if backend == "nccl" else torch.device("cpu")
        self._group = dist.new_group(backend=backend)
        self._on_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._count = 0

    def forget(self) -> None:
        """Discard the sends of a failed step, because their receivers may never receive them."""
        self._on_way.clear()

    def close(self) -> None:
        """Do nothing: the process group stays for the next pipeline."""

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce,
        introduce: Introduce,  # noqa: ARG002 - as in the protocol
    ) -> None:  # fmt: skip
        """Send all values as one tensor; with gloo, values of a GPU go through pinned memory.

        The announcement goes first, so that the receiver posts its receive.
        """
        self._count = tag = (self._count + 1) % _TAGS
        announce(_UNUSED_NUMBER, _ANNOUNCEMENT.pack(tag))
        room = self._as_one(description, payload)
        work = dist.isend(room, dst=to_lane, group=self._group, tag=tag)
        self._on_way.append((work, room))
        while len(self._on_way) > _MOST_ON_WAY:  # after these have been received, their memory is free
            oldest, room = self._on_way.popleft()
            oldest.wait()  # with NCCL, this thread's stream waits, not the host
            kind_of(room.device).hold(room)

    def _as_one(self, description: Description, values: Sequence[Any]) -> torch.Tensor:
        """Return all values as one tensor of bytes; a single contiguous tensor is not copied."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == 1 and tensors[0].device == self._room and tensors[0].is_contiguous():
            plain = tensors[0].detach().reshape(-1).view(torch.uint8)
            if len(plain) == description.num_bytes:
                return plain
        is_staged = self._room.type == "cpu" and self._device.type == "cuda"
        room = torch.empty(description.num_bytes, dtype=torch.uint8, device=self._room, pin_memory=is_staged)
        description.write(values, room)
        for tensor in tensors:  # their memory belongs to the lane's stream
            kind_of(tensor.device).hold(tensor)
        return room

    def introduced(self, from_lane: int, body: bytes, descriptor: Callable[[], int]) -> None:
        """Do nothing: this carrier introduces nothing."""

    def arrived(self, from_lane: int, head: Head, body: bytes) -> tuple[Any, torch.Tensor]:
        """Post the receive at once, so that both ends post in the same order."""
        (tag,) = _ANNOUNCEMENT.unpack(body)
        memory = torch.empty(head.num_bytes, dtype=torch.uint8, device=self._room)
        return dist.irecv(memory, src=from_lane, group=self._group, tag=tag), memory

    def receive(self, from_lane: int, head: Head, arrived: tuple[Any, torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Wait for the values, and return them."""
        work, memory = arrived
        work.wait()
        kind_of(memory.device).hold(memory)  # the thread that posted the receive allocated it, on its own stream
        return memory

    def drop(self, from_lane: int, head: Head, arrived: tuple[Any, torch.Tensor]) -> None:
        """Discard the receive."""
