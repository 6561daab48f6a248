"""Request slots: the memory of a request in progress. The number of slots limits the requests in progress.

On a GPU, a slot has pinned host memory for both directions, and memory on the first device, which later requests reuse.
A slot is free again when the GPU has finished its request, so no other synchronisation between requests is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import CudaStreams, Event, OnStream, Stream
from penstock.devices.kinds import kind_of


class RequestSlot:
    """The slot of one request; on a CPU it holds no memory."""

    def __init__(self) -> None:
        self._pinned_in, self._on_device, self._pinned_out = _TensorCache(), _TensorCache(), _TensorCache()
        self._done: Event | None = None

    def copy_in(self, values: Sequence[torch.Tensor], streams: CudaStreams) -> tuple[list[torch.Tensor], Event]:
        """Copy tensors to the first device, through pinned memory and in parallel with the work there.

        Args:
            values: tensors in host memory, or on a GPU, made on its current stream.
            streams: the streams of the first stage.

        Returns:
            The copies, and an event after them. The caller must keep the values alive until then.
        """
        staged: list[torch.Tensor] = []
        ready: Event | None = None
        for at, value in enumerate(values):
            if value.is_cuda:
                ready = kind_of(value.device).record_event(value.device)
            is_staged = value.device.type == "cpu" and not value.is_pinned()
            staged.append(self._pinned_in.like(at, value, is_pinned=True).copy_(value) if is_staged else value)
        with streams.running(streams.copies):
            buffers = [self._on_device.like(at, value, device=streams.device) for at, value in enumerate(staged)]
            found = streams.bring(staged, ready, lambda _: buffers)
            return found, streams.mark()

    def copy_out(self, values: Sequence[torch.Tensor], ready: Event, stream: Stream) -> None:
        """Copy tensors to pinned memory on a stream of their device when they are ready."""
        stream.wait_event(ready)
        with OnStream(stream):
            for at, value in enumerate(values):
                self._pinned_out.like(at, value, is_pinned=True).copy_(value, non_blocking=True)
        self.mark_done(stream)

    def mark_done(self, stream: Stream) -> None:
        """Record that the GPU has finished this request at this point of a stream."""
        # a blocking event: the waiting thread sleeps and leaves the CPU to the other threads
        self._done = blocking_event(stream)

    def wait(self) -> None:
        """Wait until the GPU has reached the mark."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None

    def outputs(self, count: int) -> list[torch.Tensor]:
        """Return copies of the outputs, because the slot's memory is reused."""
        return [self._pinned_out[at].clone() for at in range(count)]


class _TensorCache:
    """Tensors that are reused while shapes stay the same."""

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
