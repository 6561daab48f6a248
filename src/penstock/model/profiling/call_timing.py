"""Timing: how long a call takes on a device and on the host that asks for it."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.devices import cuda
from penstock.devices.kinds import kind_of

__all__ = ["Call", "Clock", "Timing", "clock_for", "engine_overhead", "in_queue", "median_time", "wall_clock_for"]

_MOST_CALLS = 64  # in one burst; a device's queue holds about a thousand kernels
_FEW_ROUNDS = 3  # even where time is short, unless a call takes long by itself
_LONG_SECONDS = 0.01


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes:
        device: from when the device begins to when it ends, with the queue full.
        host: until the host may ask for the next thing; 0 where host and device are one.
    """

    device: float
    host: float = 0.0

    def less(self, other: Timing) -> Timing:
        """Return what is left without another call, never below zero."""
        return Timing(max(0.0, self.device - other.device), max(0.0, self.host - other.host))

    @property
    def longer(self) -> float:
        """The longer of the two: what the call takes when it is repeated and nothing else runs."""
        return max(self.device, self.host)


Call = Callable[[], object]


class Clock(Protocol):
    """Times bursts of calls on one kind of device."""

    def time(self, call: Call, count: int, *, ahead_seconds: float = 0.0) -> Timing:
        """Return what a call of a burst takes; `ahead_seconds` is how long the host needs to ask for all, if known."""
        ...


class _HostClock:
    """Host and device are one, or the device is asked to finish before the clock is read."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def time(self, call: Call, count: int, *, ahead_seconds: float = 0.0) -> Timing:  # noqa: ARG002 - for queues
        self._synchronize()
        seconds = []
        with _no_collection():
            for _ in range(count):
                begin = time.perf_counter()
                call()
                self._synchronize()
                seconds.append(time.perf_counter() - begin)
        return Timing(statistics.median(seconds))  # not the mean: other work on the same cores comes in lumps


class _CudaClock:
    """Events on the current stream. The device first sleeps, so that the host runs ahead and no gaps are timed."""

    _CYCLES_A_SECOND = 2e9  # about; a sleep that is too long costs nothing but patience

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gap = 0.0
        self._gap = statistics.median(self.time(lambda: None, 1, ahead_seconds=1e-4).device for _ in range(9))

    def time(self, call: Call, count: int, *, ahead_seconds: float = 0.0) -> Timing:
        with cuda.on_gpu(self._device), _no_collection():
            start, end = cuda.timed_events()
            kind_of(self._device).synchronize(self._device)
            if ahead_seconds:
                cuda.sleep(int(ahead_seconds * self._CYCLES_A_SECOND))
            start.record()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            host = time.perf_counter() - begin
            end.record()
            end.synchronize()
        if ahead_seconds and host >= ahead_seconds:  # the call waits for the device: it saw the sleep too
            return self.time(call, count)
        between = start.elapsed_time(end) / 1e3
        busy = between - self._gap if between > 1.5 * self._gap else 0.0  # two events alone are a moment apart
        return Timing(busy / count, host / count)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else wall_clock_for(device)


def wall_clock_for(device: torch.device) -> Clock:
    """Return a clock on the wall: what the host does is timed too, and the device is waited for at both ends."""
    return _HostClock(lambda: kind_of(device).synchronize(device))


def median_time(clock: Clock, make: Callable[[], Call], *, is_reusable: bool, repeats: int, seconds: float) -> Timing:
    """Return the median of several bursts of a call that has been warmed up.

    Args:
        clock: of the device.
        make: returns the call.
        is_reusable: the call may be repeated; otherwise each burst is one call, and made anew outside of its time.
        repeats: bursts, at most.
        seconds: for all of them, about. A burst is as many calls as fit; the slowest calls get fewer bursts.
    """
    call, first = _try_out(clock, make, is_reusable=is_reusable)
    once = max(first.longer, 1e-7)
    count = min(_MOST_CALLS, max(1, int(seconds / repeats / once))) if is_reusable else 1
    fewest = min(repeats, 1 if once > 10 * _LONG_SECONDS else _FEW_ROUNDS)
    rounds = min(repeats, max(fewest, int(seconds / once / count)))
    timings = []
    for _ in range(rounds):
        call = call if is_reusable else make()
        timings.append(clock.time(call, count, ahead_seconds=2 * first.host * count))
    if rounds == 1 and first.longer:  # of two readings the one that was disturbed less
        return min(first, timings[0], key=lambda timing: timing.longer)
    return Timing(statistics.median(t.device for t in timings), statistics.median(t.host for t in timings))


def _try_out(clock: Clock, make: Callable[[], Call], *, is_reusable: bool) -> tuple[Call, Timing]:
    """Return the call, and about how long it takes: the shortest of a few, for the first ones may be disturbed."""
    call = make()
    timings = [clock.time(call, 1)]
    while len(timings) < _FEW_ROUNDS and min(timing.longer for timing in timings) < 10 * _LONG_SECONDS:
        call = call if is_reusable else make()
        timings.append(clock.time(call, 1))
    return call, min(timings, key=lambda timing: timing.longer)


def engine_overhead(clock: Clock, device: torch.device) -> Timing:
    """Return what a call of the autograd engine takes before it reaches the first node: a stage pays it once.

    Found from chains of one view and of many: the time of no view at all, on the line through both.
    """
    many = 33

    def chain(length: int) -> Timing:
        leaf = torch.zeros(1, device=device, requires_grad=True)
        with torch.enable_grad():
            end = leaf
            for _ in range(length):
                end = end.view(1)
        grad = torch.ones_like(end)

        def call() -> object:
            return torch.autograd.grad(end, leaf, grad, retain_graph=True)

        call()
        return median_time(clock, lambda: call, is_reusable=True, repeats=15, seconds=0.02)

    one, all_of_them = chain(1), chain(many)
    each = Timing((all_of_them.device - one.device) / (many - 1), (all_of_them.host - one.host) / (many - 1))
    return one.less(each)


def in_queue(timings: Sequence[Timing]) -> list[float]:
    """Return how much later the device is done for each of some calls that the host asks for one after the other.

    The device begins a call when it has done the one before and the host has asked for it: where the device is busy
    a call costs its device time, where it waits for the host it costs the host's. The sum is what all of them take.

    >>> in_queue([Timing(10.0, 1.0), Timing(0.5, 1.0), Timing(0.5, 20.0)])
    [11.0, 0.5, 11.0]
    """
    asked = done = 0.0
    costs = []
    for timing in timings:
        before = done
        asked += timing.host
        if timing.device:
            done = max(done, asked) + timing.device
        costs.append(done - before)
    return costs


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running within a timing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
