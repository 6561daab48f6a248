"""CUDA streams: the two streams of a lane on a GPU, one for compute and one for copies to the lane.

Lanes that share a GPU exchange values in the same way as lanes on two GPUs. The sender records an event after the
value. The receiver's copy stream waits for this event and copies the value into the receiver's memory, and the
receiver's compute stream waits for the copy. The host never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from penstock.devices.sanitizer import sanitized

Event = torch.cuda.Event
Stream = torch.cuda.Stream
Workspace = Callable[[Sequence[Any]], Sequence[torch.Tensor | None]]  # from the values that arrive to their targets


def current_stream(device: torch.device) -> Stream:
    """Return this thread's stream on a GPU. The index is passed, so torch need not look it up."""
    return torch.cuda.current_stream(device.index)


_THREAD = threading.local()  # the devices that a thread has worked on


class OnStream:
    """Work on a stream and on its device; does the work of torch.cuda.device and torch.cuda.stream together."""

    __slots__ = ("_before", "_guard", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        index = self._stream.device_index
        self._guard: torch.cuda.device | None = None
        self._before = torch.cuda.current_stream()
        if self._before.device_index != index:  # the guard initializes no device that is unused
            self._guard = torch.cuda.device(index)
            self._guard.__enter__()  # type: ignore[no-untyped-call]
            self._before = torch.cuda.current_stream(index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)
        if self._guard is not None:
            self._guard.__exit__(None, None, None)


class CudaStreams:
    """The streams of one lane on a GPU.

    Args:
        device: a GPU.
        compute: the stream that the lane computes on; by default a new one.

    Attributes:
        is_shared: whether other lanes compute on the same stream.
        lent: the caller's stream, if the lane works on it.
    """

    def __init__(self, device: torch.device, compute: Stream | None = None) -> None:
        self.device = device
        self.compute = compute or new_stream(device)
        self.copies = new_stream(device)
        self.is_shared = compute is not None
        self._capturing: Stream | None = None
        self._sides: dict[torch.device, Stream] = {}
        self.lent: Stream | None = None
        self._caller: Stream | None = None  # the stream from which the last step was requested
        self.begun, self.ended = self.event(), self.event()
        self.callers: dict[torch.device, Event] = {}  # recorded on the caller's stream of each device
        self._base, self._base_ns = self.event(is_timed=True), 0

    def event(self, *, is_timed: bool = False) -> Event:
        """Return a new event."""
        return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]

    @contextmanager
    def running(self, stream: Stream | None = None) -> Iterator[None]:
        """Run the work of this thread on the lane's compute stream, or on the given stream."""
        if self.lent is not None:  # this thread is on the lent stream already
            with sanitized():
                yield
            return
        with OnStream(stream or self.compute), sanitized():
            self._make_current()
            yield

    def _make_current(self) -> None:
        """Make the device's context current in a thread that is new to it; else torch warns at its first product."""
        known = _THREAD.__dict__.setdefault("devices", set())
        if self.device not in known:
            known.add(self.device)
            self.compute.query()  # any runtime call does it; this one does not wait

    def callers_stream(self) -> Stream:
        """Return the caller's stream, ordered after the last step's, so that it may read that step's losses."""
        now = current_stream(self.device)
        # compared by handle: in torch, a stream does not differ from None
        if self._caller is None or self._caller.cuda_stream != now.cuda_stream:
            if self._caller is not None:
                now.wait_stream(self._caller)
            self._caller = now
        return now

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture on a separate stream if other lanes compute on this lane's stream too.

        Autograd adds to a gradient on the stream that first used the parameter. So lanes that hold the same parameters
        draw each other's streams into a capture, and no other work may run on these streams meanwhile.
        """
        if not self.is_shared:
            yield
            return
        if self._capturing is None:  # one for all captures: torch has only 32 streams per device
            self._capturing = new_stream(self.device)
        self._capturing.wait_stream(self.compute)
        with OnStream(self._capturing):
            yield
        self.compute.wait_stream(self._capturing)

    def copy_after_compute(self) -> None:
        """Let copies wait for all compute work queued so far."""
        self.copies.wait_stream(self.compute)

    def copy_after(self, event: Event | None) -> None:
        """Let copies wait for an event."""
        if event is not None:
            self.copies.wait_event(event)

    def record(self, event: Event | None) -> None:
        """Record an event after all compute work queued so far."""
        if event is not None:
            event.record(self.compute)

    def mark(self) -> Event:
        """Return an event after all work queued on the current stream so far."""
        event = self.event()
        event.record(current_stream(self.device))
        return event

    def bring(self, values: Sequence[Any], ready: Event | None, into: Workspace | None = None) -> list[Any]:
        """Copy values into this lane's memory once they are ready; the lane's later work waits for the copies.

        Args:
            values: tensors on any device; `requires_grad` is kept. Other values are returned as they are.
            ready: the event after the work that makes the values; None if they are ready.
            into: returns the target tensor of each value; by default new memory.
        """
        targets = [None] * len(values) if into is None else into(values)
        now = current_stream(self.device)
        if ready is None and all(value.device == self.device for value in values if isinstance(value, torch.Tensor)):
            # the values are ready and on this device: no copy stream is needed
            return [
                value if target is None else target.copy_(value.detach())
                for value, target in zip(values, targets, strict=True)
            ]
        with OnStream(self.copies):
            if self.lent is not None:
                self.copies.wait_event(self.begun)
            if ready is not None:
                self.copies.wait_event(ready)
            found = [self._copied(value, ready, target, now) for value, target in zip(values, targets, strict=True)]
        now.wait_stream(self.copies)
        return found

    def _copied(self, value: Any, ready: Event | None, target: torch.Tensor | None, now: Stream) -> Any:  # noqa: ANN401 - a tensor, or a plain number
        if not isinstance(value, torch.Tensor):
            return value
        is_new = target is None
        copied = torch.empty_like(value, device=self.device, requires_grad=False) if target is None else target.detach()
        with ExitStack() as contexts:
            if value.is_cuda and value.device != self.device:  # torch copies on a stream of the source device
                side = self._side(value.device)
                made = self.callers.get(value.device) if ready is None else ready
                if made is not None:
                    side.wait_event(made)
                if ready is None:  # the caller may free its memory as soon as the step returns
                    value.record_stream(side)
                contexts.enter_context(OnStream(side))
            copied.copy_(value.detach(), non_blocking=True)
        if is_new:
            copied.record_stream(now)
            if value.is_cuda:  # the sender drops it at once; its memory must not be reused before the copy
                value.record_stream(self.copies if value.device == self.device else self._side(value.device))
        return copied.requires_grad_(value.requires_grad)

    def _side(self, device: torch.device) -> Stream:
        if device not in self._sides:
            self._sides[device] = new_stream(device)
        return self._sides[device]

    # ---- times of the GPU itself

    def start_clock(self) -> None:
        """Relate the GPU's clock to the host's; waits until the GPU has finished its work."""
        torch.cuda.synchronize(self.device)
        self._base.record(self.compute)
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def stamp(self) -> Event:
        """Return an event that records the time at which the compute stream reaches it."""
        event = self.event(is_timed=True)
        event.record(self.compute)
        return event

    def nanoseconds(self, stamp: Any) -> int:  # noqa: ANN401 - what `stamp` returned
        """Return the time of a stamp on the host's clock; waits until the stream has reached it."""
        stamp.synchronize()
        return self._base_ns + int(self._base.elapsed_time(stamp) * 1e6)


def new_stream(device: torch.device) -> Stream:
    """Return a new stream of a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def first_lane_streams(streams: Sequence[CudaStreams]) -> list[tuple[CudaStreams, Stream]]:
    """Return the first lane of each device with the caller's stream there, ordered after the last step's stream."""
    firsts = {own.device: own for own in reversed(streams)}  # one event per device is enough
    return [(own, own.callers_stream()) for own in firsts.values()]


@contextmanager
def ordered_after_callers(streams: Iterable[CudaStreams]) -> Iterator[None]:
    """Run the lanes' work after the caller's earlier work, and the caller's later work after the lanes'.

    This also protects memory, without informing the allocator: what the caller frees after the step is not reused
    before the lanes have finished with it, and the reverse.
    """
    everyone = list(streams)
    begun = {own.device: stream.record_event(own.begun) for own, stream in first_lane_streams(everyone)}
    for own in everyone:
        now, own.callers = begun[own.device], begun
        own.compute.wait_event(now)
        own.copies.wait_event(now)
        own.copies.wait_event(own.ended)  # the last step may have run from another of the caller's streams
    try:
        yield
    finally:
        for own in everyone:  # the compute stream has waited for all copies
            current_stream(own.device).wait_event(own.compute.record_event(own.ended))


class LentStream:
    """Let the only lane work on the caller's stream, so that neither has to wait for the other.

    Used for steps that launch no torch operations, such as replays of graphs: these operations would not run on the
    lane's own stream. In a small step, ordering two streams takes the host longer than the step takes the GPU.
    """

    __slots__ = ("_own",)

    def __init__(self, own: CudaStreams) -> None:
        self._own = own

    def __enter__(self) -> None:
        own = self._own
        now = own.callers_stream()
        now.record_event(own.begun)
        own.lent = now

    def __exit__(self, *_: object) -> None:
        self._own.lent = None
