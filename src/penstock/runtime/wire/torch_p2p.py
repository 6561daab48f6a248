"""Torch P2P: values by torch.distributed's isend and irecv: gloo on CPUs, NCCL between GPUs.

A lane learns over its links that values are on the way, and posts the receive then; so both ends name them in the
same order, as NCCL needs, and sizes are known.
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
from penstock.runtime.wire.transport import Payload
from penstock.runtime.wire.value_carrier import Announce, Introduce

__all__ = ["TorchP2P"]

_ANNOUNCEMENT = struct.Struct("<I")  # the tag
_BY_TORCH = 0  # there is one way: the number says nothing
_TAGS = 1 << 30
_MOST_ON_WAY = 4  # sends that may be under way before the thread that sends waits for the oldest


class TorchP2P:
    """Carries values by sends and receives of torch.distributed.

    Args:
        backend: "gloo" or "nccl".
        device: of the lane.
    """

    beside_bytes = 0
    needs_reader = True

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self._device = backend, device
        self._room = device if backend == "nccl" else torch.device("cpu")
        self._group = dist.new_group(backend=backend)
        self._on_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._count = 0

    def forget(self) -> None:
        """Let go of what was sent in a step that failed: who should have received it may never do so."""
        self._on_way.clear()

    def close(self) -> None:
        """The process group stays, for the next pipeline."""

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce,
        introduce: Introduce,  # noqa: ARG002 - as the interface
    ) -> None:  # fmt: skip
        """Send all values as one; with gloo, those of a GPU go through pinned memory.

        The receiver is told first: it posts its receive then.
        """
        self._count = tag = (self._count + 1) % _TAGS
        announce(_BY_TORCH, _ANNOUNCEMENT.pack(tag))
        room = self._as_one(description, payload)
        work = dist.isend(room, dst=to_lane, group=self._group, tag=tag)
        self._on_way.append((work, room))
        while len(self._on_way) > _MOST_ON_WAY:  # their memory is free when they have been received
            oldest, room = self._on_way.popleft()
            oldest.wait()  # of NCCL: this thread's stream does, and not the host
            kind_of(room.device).hold(room)

    def _as_one(self, description: Description, values: Sequence[Any]) -> torch.Tensor:
        """Return all values as one stretch of bytes; one tensor that lies so already is sent as it lies."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == 1 and tensors[0].device == self._room and tensors[0].is_contiguous():
            plain = tensors[0].detach().reshape(-1).view(torch.uint8)
            if len(plain) == description.num_bytes:
                return plain
        is_staged = self._room.type == "cpu" and self._device.type == "cuda"
        room = torch.empty(description.num_bytes, dtype=torch.uint8, device=self._room, pin_memory=is_staged)
        description.write(values, room)
        for tensor in tensors:  # memory of the lane's own stream
            kind_of(tensor.device).hold(tensor)
        return room

    def introduced(self, from_lane: int, body: bytes, descriptor: Callable[[], int]) -> None:
        """There is nothing to introduce."""

    def arrived(self, from_lane: int, head: Head, body: bytes) -> tuple[Any, torch.Tensor]:
        """Post the receive at once, so that both ends post in the same order."""
        (tag,) = _ANNOUNCEMENT.unpack(body)
        memory = torch.empty(head.num_bytes, dtype=torch.uint8, device=self._room)
        return dist.irecv(memory, src=from_lane, group=self._group, tag=tag), memory

    def receive(self, from_lane: int, head: Head, arrived: tuple[Any, torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Wait for the values."""
        work, memory = arrived
        work.wait()
        kind_of(memory.device).hold(memory)  # the thread that posted the receive made it, on a stream of its own
        return memory

    def drop(self, from_lane: int, head: Head, arrived: tuple[Any, torch.Tensor]) -> None:
        """Let the receive go."""
