"""Seats: memory that a request has to itself while it is in flight. As many as there are, so many are in flight.

On a GPU a seat holds pinned host memory for both ways, and memory on the first device; later requests use all of it
again. A seat is free again when the GPU has done all for its request: nothing else has to keep requests apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import CudaStreams, Event, OnStream, Stream
from penstock.devices.kinds import kind_of

__all__ = ["RequestSlot"]


class RequestSlot:
    """A place for one request; on a CPU that is all."""

    def __init__(self) -> None:
        self._pinned_in, self._on_device, self._pinned_out = _Memory(), _Memory(), _Memory()
        self._done: Event | None = None

    def bring(self, values: Sequence[torch.Tensor], streams: CudaStreams) -> tuple[list[torch.Tensor], Event]:
        """Copy tensors to the first device, through pinned memory and beside the work there.

        Args:
            values: in host memory, or on a GPU, made on the current stream there.
            streams: of the first stage.

        Returns:
            The copies, and an event behind them. The values must be held until then.
        """
        staged: list[torch.Tensor] = []
        ready: Event | None = None
        for at, value in enumerate(values):
            if value.is_cuda:
                ready = kind_of(value.device).record_event(value.device)
            is_staged = value.device.type == "cpu" and not value.is_pinned()
            staged.append(self._pinned_in.like(at, value, is_pinned=True).copy_(value) if is_staged else value)
        with streams.running(streams.copies):
            rooms = [self._on_device.like(at, value, device=streams.device) for at, value in enumerate(staged)]
            found = streams.bring(staged, ready, lambda _: rooms)
            return found, streams.mark()

    def take(self, values: Sequence[torch.Tensor], ready: Event, stream: Stream) -> None:
        """Copy tensors to pinned memory on a stream of their device, when they are ready."""
        stream.wait_event(ready)
        with OnStream(stream):
            for at, value in enumerate(values):
                self._pinned_out.like(at, value, is_pinned=True).copy_(value, non_blocking=True)
        self.mark(stream)

    def mark(self, stream: Stream) -> None:
        """Note that the GPU has done all for this request when it comes to here on a stream."""
        # blocking: the thread that waits sleeps, and leaves the processor to those that prepare requests
        self._done = blocking_event(stream)

    def wait(self) -> None:
        """Wait until the GPU has done what was marked."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None

    def taken(self, count: int) -> list[torch.Tensor]:
        """Return what was copied, in memory of its own: the seat's is used again."""
        return [self._pinned_out[at].clone() for at in range(count)]


class _Memory:
    """Tensors that are used again while shapes stay the same."""

    def __init__(self) -> None:
        self._tensors: dict[int, torch.Tensor] = {}

    def __getitem__(self, at: int) -> torch.Tensor:
        return self._tensors[at]

    def like(
        self, at: int, value: torch.Tensor, *, device: torch.device | str = "cpu", is_pinned: bool = False
    ) -> torch.Tensor:
        """Return memory for a value."""
        old = self._tensors.get(at)
        if old is None or old.shape != value.shape or old.dtype != value.dtype:
            old = torch.empty(value.shape, dtype=value.dtype, device=device, pin_memory=is_pinned)
            self._tensors[at] = old
        return old
