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

from penstock.runtime.letters import Description

__all__ = ["PointToPoint"]

_TAGS = 1 << 30


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

    def start(self) -> None:
        """Wait for what earlier steps have sent: their memory is free then."""
        while self._on_way:
            work, _ = self._on_way.popleft()
            work.wait()

    def next_tag(self) -> int:
        """Return a number for the next message, which its head carries to the receiver."""
        self._count = (self._count + 1) % _TAGS
        return self._count

    def send(self, to_lane: int, tag: int, description: Description, values: Sequence[Any]) -> None:
        """Send all values as one; those of a GPU go through pinned memory where the backend is gloo."""
        is_staged = self._room.type == "cpu" and self._device.type == "cuda"
        room = torch.empty(description.num_bytes, dtype=torch.uint8, device=self._room, pin_memory=is_staged)
        description.write(values, room)
        work = dist.isend(room, dst=to_lane, group=self._group, tag=tag)
        self._on_way.append((work, room))

    def post(self, from_lane: int, tag: int, num_bytes: int) -> tuple[Any, torch.Tensor]:
        """Begin to receive a message that is on its way."""
        room = torch.empty(num_bytes, dtype=torch.uint8, device=self._room)
        return dist.irecv(room, src=from_lane, group=self._group, tag=tag), room
