"""PointToPoint: values by torch.distributed's isend and irecv: gloo on CPUs, NCCL between GPUs.

A lane learns over its links that values are on the way, and posts the receive then; so both ends name them in the
same order, as NCCL needs, and sizes are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.wire.messages import Description

__all__ = ["PointToPoint"]

_TAGS = 1 << 30
_MOST_ON_WAY = 4  # sends that may be under way before the thread that sends waits for the oldest


class PointToPoint:
    """Sends and receives of one process.

    Args:
        backend: "gloo" or "nccl".
        device: of the lane.
    """

    def __init__(self, backend: str, device: torch.device) -> None:
        self.backend, self._device = backend, device
        self._room = device if backend == "nccl" else torch.device("cpu")
        self._group = dist.new_group(backend=backend)
        self._on_way: deque[tuple[Any, torch.Tensor]] = deque()
        self._count = 0

    def forget(self) -> None:
        """Let go of what was sent in a step that failed: who should have received it may never do so."""
        self._on_way.clear()

    def next_tag(self) -> int:
        """Return a number for the next message, which its head carries to the receiver."""
        self._count = (self._count + 1) % _TAGS
        return self._count

    def send(self, to_lane: int, tag: int, description: Description, values: Sequence[Any]) -> None:
        """Send all values as one; those of a GPU go through pinned memory where the backend is gloo."""
        room = self._as_one(description, values)
        work = dist.isend(room, dst=to_lane, group=self._group, tag=tag)
        self._on_way.append((work, room))
        while len(self._on_way) > _MOST_ON_WAY:  # their memory is free when they have been received
            oldest, room = self._on_way.popleft()
            oldest.wait()  # of NCCL: this thread's stream does, and not the host
            _in_use_here(room)

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
        for tensor in tensors:
            _in_use_here(tensor)
        return room

    def post(self, from_lane: int, tag: int, num_bytes: int) -> tuple[Any, torch.Tensor]:
        """Begin to receive a message that is on its way."""
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self._room)
        return dist.irecv(room, src=from_lane, group=self._group, tag=tag), room


def _in_use_here(tensor: torch.Tensor) -> None:
    """Keep memory of a lane's own stream until this thread's stream has come this far."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
