"""CUDA streams: the streams of a lane on a GPU: one computes, one copies values to the lane at the same time.

Lanes that share a GPU pass values in the same way as lanes on two GPUs. The sender records an event after the value.
The receiver's copy stream waits for this event and copies the value into the receiver's memory, and the receiver's
compute stream waits for the copy. The host never waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from penstock.devices.sanitizer import sanitized

__all__ = [
    "CudaStreams", "Event", "Lent", "OnStream", "Stream", "Workspace", "current_stream", "followed", "joined",
    "new_stream",
]  # fmt: skip

Event = torch.cuda.Event
Stream = torch.cuda.Stream
Workspace = Callable[[Sequence[Any]], Sequence[torch.Tensor | None]]  # from what arrives to where it is to go


def current_stream(device: torch.device) -> Stream:
    """Return the stream of a GPU that this thread works on: by its number, which torch need not look up."""
    return torch.cuda.current_stream(device.index)


_THREAD = threading.local()  # the devices that a thread has worked on


class OnStream:
    """Work on a stream, and on its device: what torch.cuda.device and torch.cuda.stream do together."""

    __slots__ = ("_before", "_guard", "_stream")

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        index = self._stream.device_index
        self._guard: torch.cuda.device | None = None
        self._before = torch.cuda.current_stream()
        if self._before.device_index != index:  # by its guard, which does not wake a device that was asleep
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
        compute: the stream that the lane computes on; its own where none is given.

    Attributes:
        is_shared: other lanes compute on the same stream.
        lent: the caller's stream, where the lane works on that.
    """

    def __init__(self, device: torch.device, compute: Stream | None = None) -> None:
        self.device = device
        self.compute = compute or new_stream(device)
        self.copies = new_stream(device)
        self.is_shared = compute is not None
        self._capturing: Stream | None = None
        self._sides: dict[torch.device, Stream] = {}
        self.lent: Stream | None = None
        self._caller: Stream | None = None  # the stream that asked for the last step
        self.begun, self.ended = self.event(), self.event()
        self.callers: dict[torch.device, Event] = {}  # behind what the caller's own streams had been given
        self._base, self._base_ns = self.event(is_timed=True), 0

    def event(self, *, is_timed: bool = False) -> Event:
        """Return a new event."""
        return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]

    @contextmanager
    def running(self, stream: Stream | None = None) -> Iterator[None]:
        """Let what this thread does inside run on the lane's stream, or on another."""
        if self.lent is not None:  # this thread is there
            with sanitized():
                yield
            return
        with OnStream(stream or self.compute), sanitized():
            self._make_current()
            yield

    def _make_current(self) -> None:
        """Make the device's context current in a thread that is new to it, or torch warns at its first product."""
        known = _THREAD.__dict__.setdefault("devices", set())
        if self.device not in known:
            known.add(self.device)
            self.compute.query()  # any call of the runtime does it; this one waits for nothing

    def callers_stream(self) -> Stream:
        """Return the caller's stream, behind the one that asked for the last step, and may read its losses."""
        now = current_stream(self.device)
        # by their numbers: torch takes a stream to be no other than None
        if self._caller is None or self._caller.cuda_stream != now.cuda_stream:
            if self._caller is not None:
                now.wait_stream(self._caller)
            self._caller = now
        return now

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture on a stream of its own if other lanes compute on this lane's stream too.

        Lanes that hold the same parameters draw each other's streams into a capture, because autograd adds to a
        gradient on the stream that first used the parameter. So no other work may run there during a capture.
        """
        if not self.is_shared:
            yield
            return
        if self._capturing is None:  # one for all captures: torch has only 32 streams to give out
            self._capturing = new_stream(self.device)
        self._capturing.wait_stream(self.compute)
        with OnStream(self._capturing):
            yield
        self.compute.wait_stream(self._capturing)

    def copy_after_compute(self) -> None:
        """Let copies wait for everything that the lane was given to compute."""
        self.copies.wait_stream(self.compute)

    def copy_after(self, event: Event | None) -> None:
        """Let copies wait for an event."""
        if event is not None:
            self.copies.wait_event(event)

    def record(self, event: Event | None) -> None:
        """Record an event after everything that the lane was given to compute."""
        if event is not None:
            event.record(self.compute)

    def mark(self) -> Event:
        """Return an event behind all that the lane has been given to do so far."""
        event = self.event()
        event.record(current_stream(self.device))
        return event

    def bring(self, values: Sequence[Any], ready: Event | None, into: Workspace | None = None) -> list[Any]:
        """Copy values to memory of this lane, when they are ready; what the lane does from now on waits for them.

        Args:
            values: tensors of whatever device, with the mark of whether a gradient is wanted; other things stay.
            ready: behind what makes them; None where they are.
            into: returns where each is to go; new memory by default.
        """
        rooms = [None] * len(values) if into is None else into(values)
        now = current_stream(self.device)
        if ready is None and all(value.device == self.device for value in values if isinstance(value, torch.Tensor)):
            # they are there, and whoever made them has been waited for: a copy needs no stream of its own
            return [
                value if room is None else room.copy_(value.detach()) for value, room in zip(values, rooms, strict=True)
            ]
        with OnStream(self.copies):
            if self.lent is not None:
                self.copies.wait_event(self.begun)
            if ready is not None:
                self.copies.wait_event(ready)
            found = [self._copied(value, ready, room, now) for value, room in zip(values, rooms, strict=True)]
        now.wait_stream(self.copies)
        return found

    def _copied(self, value: Any, ready: Event | None, room: torch.Tensor | None, now: Stream) -> Any:  # noqa: ANN401 - a tensor, or a plain number
        if not isinstance(value, torch.Tensor):
            return value
        is_new = room is None
        copied = torch.empty_like(value, device=self.device, requires_grad=False) if room is None else room.detach()
        with ExitStack() as around:
            if value.is_cuda and value.device != self.device:  # torch copies on a stream of the source's device
                side = self._side(value.device)
                made = self.callers.get(value.device) if ready is None else ready
                if made is not None:
                    side.wait_event(made)
                if ready is None:  # the caller's own memory, which may be freed as soon as the step returns
                    value.record_stream(side)
                around.enter_context(OnStream(side))
            copied.copy_(value.detach(), non_blocking=True)
        if is_new:
            copied.record_stream(now)
            if value.is_cuda:  # the sender forgets it at once, and may not use its memory again before it is copied
                value.record_stream(self.copies if value.device == self.device else self._side(value.device))
        return copied.requires_grad_(value.requires_grad)

    def _side(self, device: torch.device) -> Stream:
        if device not in self._sides:
            self._sides[device] = new_stream(device)
        return self._sides[device]

    # ---- times of the GPU itself

    def start_clock(self) -> None:
        """Agree with the host on a moment; waits until the GPU has nothing left to do."""
        torch.cuda.synchronize(self.device)
        self._base.record(self.compute)
        self._base.synchronize()
        self._base_ns = time.monotonic_ns()

    def stamp(self) -> Event:
        """Return an event that knows when the lane's stream came to it."""
        event = self.event(is_timed=True)
        event.record(self.compute)
        return event

    def nanoseconds(self, stamp: Event) -> int:
        """Return when the stream came to a stamp, on the host's clock; waits until it has."""
        stamp.synchronize()
        return self._base_ns + int(self._base.elapsed_time(stamp) * 1e6)


def new_stream(device: torch.device) -> Stream:
    """Return a stream of a GPU."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def followed(streams: Sequence[CudaStreams]) -> list[tuple[CudaStreams, Stream]]:
    """Return the first lane of each device, and the caller's stream there, behind the one of the step before."""
    firsts = {own.device: own for own in reversed(streams)}  # one event a device is enough
    return [(own, own.callers_stream()) for own in firsts.values()]


@contextmanager
def joined(streams: Iterable[CudaStreams]) -> Iterator[None]:
    """Let lanes begin behind what the caller's own streams have been given, and these go on behind the lanes.

    So memory that the caller frees after the step is not used again before lanes are done with it, and the other way
    round, without a word to the allocator.
    """
    everyone = list(streams)
    begun = {own.device: stream.record_event(own.begun) for own, stream in followed(everyone)}
    for own in everyone:
        now, own.callers = begun[own.device], begun
        own.compute.wait_event(now)
        own.copies.wait_event(now)
        own.copies.wait_event(own.ended)  # the step before, which another of the caller's streams may have asked for
    try:
        yield
    finally:
        for own in everyone:  # the lane's own stream has waited for all that was brought
            current_stream(own.device).wait_event(own.compute.record_event(own.ended))


class Lent:
    """Let the only lane work on the stream that the caller works on: neither has to wait for the other.

    For steps that compute nothing by torch's own operations, as replays of graphs: those are not on the lane's stream.
    A small step takes the GPU less time than it takes the host to say who waits for whom.

    Args:
        own: the lane's.
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
