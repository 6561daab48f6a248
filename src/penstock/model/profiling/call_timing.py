"""Call timing: the time that a call takes on a device, and on the host that launches it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.devices import cuda
from penstock.devices.graph_capture import no_collection
from penstock.devices.kinds import kind_of

_MOST_CALLS = 64  # in one burst; the queue of a device holds about a thousand kernels
_FEW_ROUNDS = 3  # the minimum, even if time is short, unless a single call takes long
_LONG_SECONDS = 0.01


@dataclass(frozen=True)
class Timing:
    """The seconds of one call."""

    device: float  # the time that the device works on it, measured with a full queue
    host: float = 0.0  # the time until the host can launch the next call; 0 if host and device are the same

    def less(self, other: Timing) -> Timing:
        """Return the time without that of another call, at least zero."""
        return Timing(max(0.0, self.device - other.device), max(0.0, self.host - other.host))

    @property
    def longer(self) -> float:
        """The longer of the two times: the time per call if it is repeated and nothing else runs."""
        return max(self.device, self.host)


Call = Callable[[], object]


class _HostClock:
    """A clock of the host; it waits for the device, if that is not the host, before each reading."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize

    def time(self, call: Call, count: int, *, ahead_seconds: float = 0.0) -> Timing:  # noqa: ARG002 - for queues only
        self._synchronize()
        seconds = []
        with no_collection(collects=False):
            for _ in range(count):
                begin = time.perf_counter()
                call()
                self._synchronize()
                seconds.append(time.perf_counter() - begin)
        return Timing(statistics.median(seconds))  # not the mean: other work on the same cores comes in bursts


class _CudaClock:
    """A clock of CUDA events on the current stream.

    The device first sleeps, so that the host runs ahead and the device does not wait between calls.
    """

    _CYCLES_PER_SECOND = 2e9  # approximate; too long a sleep does not affect the result

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gap = 0.0
        self._gap = statistics.median(self.time(lambda: None, 1, ahead_seconds=1e-4).device for _ in range(9))

    def time(self, call: Call, count: int, *, ahead_seconds: float = 0.0) -> Timing:
        """Return the time per call of a burst; `ahead_seconds` is the time to launch all of it, if known."""
        with cuda.on_gpu(self._device), no_collection(collects=False):
            start, end = cuda.timed_events()
            kind_of(self._device).synchronize(self._device)
            if ahead_seconds:
                cuda.sleep(int(ahead_seconds * self._CYCLES_PER_SECOND))
            start.record()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            host = time.perf_counter() - begin
            end.record()
            end.synchronize()
        if ahead_seconds and host >= ahead_seconds:  # the call waits for the device, so its time includes the sleep
            return self.time(call, count)
        between = start.elapsed_time(end) / 1e3
        busy = between - self._gap if between > 1.5 * self._gap else 0.0  # the gap between two events without a call
        return Timing(busy / count, host / count)


Clock = _HostClock | _CudaClock


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return _CudaClock(device) if device.type == "cuda" else wall_clock_for(device)


def wall_clock_for(device: torch.device) -> Clock:
    """Return a wall clock: it includes the work of the host, and waits for the device before and after each call."""
    return _HostClock(lambda: kind_of(device).synchronize(device))


def median_time(clock: Clock, make: Callable[[], Call], *, is_reusable: bool, repeats: int, seconds: float) -> Timing:
    """Return the median time per call of several bursts; the call must be warm.

    Args:
        clock: the clock of the device.
        make: the function that returns the call.
        is_reusable: whether the call can be repeated; if not, each burst is one new call, made before its timing.
        repeats: the maximum number of bursts.
        seconds: the approximate time for all bursts; a burst has as many calls as fit, and slow calls get fewer bursts.
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
    if rounds == 1 and first.longer:  # of two readings, return the less disturbed one
        return min(first, timings[0], key=lambda timing: timing.longer)
    return Timing(statistics.median(t.device for t in timings), statistics.median(t.host for t in timings))


def _try_out(clock: Clock, make: Callable[[], Call], *, is_reusable: bool) -> tuple[Call, Timing]:
    """Return the call and its approximate time: the shortest of a few, since the first may be disturbed."""
    call = make()
    timings = [clock.time(call, 1)]
    while len(timings) < _FEW_ROUNDS and min(timing.longer for timing in timings) < 10 * _LONG_SECONDS:
        call = call if is_reusable else make()
        timings.append(clock.time(call, 1))
    return call, min(timings, key=lambda timing: timing.longer)


def engine_overhead(clock: Clock, device: torch.device) -> Timing:
    """Return the time of a call of the autograd engine before the first node; a stage pays it once.

    It is extrapolated from two chains, of one view and of many views, to a chain without views.
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
    """Return the time that each call adds until the device is done, if the host launches one call after the other.

    The device starts a call when the previous call is done and the host has launched this one. While the device is
    busy, a call costs its device time. While the device waits for the host, a call costs its host time. The sum is the
    time of all calls.

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
