"""Timing: how long a call takes on a GPU, measured so that the figure means what it says."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError

if TYPE_CHECKING:
    import torch

    from penstock.model.profiling.call_timing import Call, Clock

__all__ = ["Measurement", "measure"]

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_SHORT_SECONDS = 50e-6  # two events alone are some microseconds apart: what is shorter is timed in bursts
_DOUBTFUL_SECONDS = 1e-3  # a call that seems to take less may be short, and the host have been busy with others
_MOST_CALLS = 64  # in a burst: a queue holds about a thousand kernels
_MOST_AHEAD_SECONDS = 0.1  # what takes the host longer has more kernels than the queue holds, so it cannot run ahead
_FLUSH_BYTES = 256 * 2**20  # more than the caches of any GPU


@dataclass(frozen=True)
class Measurement:
    """How long each of some runs took, in seconds.

    >>> found = Measurement((0.00131, 0.0012, 0.00123))
    >>> found.median, found.low, found.high
    (0.00123, 0.0012, 0.00131)
    >>> print(found)
    1.23 ms (1.20-1.31), 3 runs
    """

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """The time that half of the runs stay below."""
        return statistics.median(self.times)

    @property
    def low(self) -> float:
        """The time of the quickest run."""
        return min(self.times)

    @property
    def high(self) -> float:
        """The time of the slowest run."""
        return max(self.times)

    def __str__(self) -> str:
        unit, size = next((u for u in _UNITS if self.median >= u[1]), _UNITS[-1])
        scaled = [seconds / size for seconds in (self.median, self.low, self.high)]
        digits = 2 - math.floor(math.log10(scaled[0])) if scaled[0] > 0 else 2
        median, low, high = (f"{number:.{min(2, max(0, digits))}f}" for number in scaled)
        return f"{median} {unit} ({low}-{high}), {len(self.times)} run{'' if len(self.times) == 1 else 's'}"


def measure(
    fn: Callable[..., object],
    *args: Any,  # noqa: ANN401 - whatever the function takes
    repeats: int = 10,
    warm: int = 3,
    device: torch.device | str | None = None,
    flush_cache: bool = False,
    host: bool = False,
    **kwargs: Any,  # noqa: ANN401
) -> Measurement:
    """Return how long `fn(*args, **kwargs)` takes.

    On a GPU the clock is the GPU's own: from when it comes to the work of a call to when that is done. It is given
    something to do before, so that the host runs ahead and its launches are not in the figure. With `host` the clock
    is the host's, from the call to when the GPU is idle again. On a CPU both are the same.

    Calls of a GPU that are shorter than 50 µs are timed in bursts, and each time is the mean of one.

    Args:
        fn: what to time. It may run more often than `warm` and `repeats` say. Only work on the current stream is seen.
        args: what it takes. A keyword of the same name as one below goes through a lambda.
        repeats: runs that are timed.
        warm: runs before them, which are not: the first ones load kernels, choose algorithms and find memory.
        device: where the work is; by default where the tensors among the arguments are, and without any the current
            GPU, or the CPU where there is none.
        flush_cache: empty the device's caches before each run, as other work would.
        host: time what the host does as well.
        kwargs: what it takes.

    Raises:
        UsageError: an argument that cannot be right, or a function that gives the GPU nothing to do.

    >>> import torch
    >>> found = measure(torch.add, torch.zeros(8), 1.0, repeats=5)
    >>> len(found.times), 0 < found.low <= found.median <= found.high
    (5, True)
    """
    import torch

    from penstock.model.profiling.call_timing import clock_for, wall_clock_for

    _check(fn, repeats=repeats, warm=warm)
    where = _device(device, [*args, *kwargs.values()])
    clock = wall_clock_for(where) if host else clock_for(where)

    def call() -> object:
        return fn(*args, **kwargs)

    for _ in range(warm):
        call()
    count, ahead = _burst(clock, call, where, one_at_a_time=flush_cache or host)
    room = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=where) if flush_cache else None
    times = []
    for _ in range(repeats):
        if room is not None:
            room.zero_()
        times.append(clock.time(call, count, ahead_seconds=ahead).device)
    if where.type == "cuda" and not host and not flush_cache and not statistics.median_low(times):
        raise UsageError(
            f"{where}: it was given nothing to do on its current stream; for work of the CPU give device='cpu', and"
            " for what the host does as well host=True"
        )
    return Measurement(tuple(times))


def _burst(clock: Clock, call: Call, device: torch.device, *, one_at_a_time: bool) -> tuple[int, float]:
    """Return how many calls to time at once, and how long the host needs to ask for them: the device waits so long."""
    if device.type != "cuda":
        return 1, 0.0
    looks = [clock.time(call, 1)]
    if _SHORT_SECONDS <= looks[0].device < _DOUBTFUL_SECONDS:  # or the device waited for a host that was slow to ask
        looks.append(clock.time(call, 1, ahead_seconds=min(2 * looks[0].host, _MOST_AHEAD_SECONDS)))
    host = min(look.host for look in looks)
    count = 1
    if not one_at_a_time and min(look.device for look in looks) < _SHORT_SECONDS:
        count = _MOST_CALLS
    ahead = 2 * host * count  # twice: what it takes differs from run to run
    if ahead > _MOST_AHEAD_SECONDS:
        count, ahead = 1, 2 * host
    return count, ahead if ahead <= _MOST_AHEAD_SECONDS else 0.0


def _check(fn: object, **counts: int) -> None:
    faults = (
        []
        if callable(fn)
        else [f"fn: {type(fn).__name__} cannot be called; to time an expression, write lambda: before it"]
    )
    for (name, number), least in zip(counts.items(), (1, 0), strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            faults.append(f"{name}: {number!r} must be a whole number, {least} or more")
    if faults:
        raise UsageError("; ".join(faults))


def _device(given: torch.device | str | None, values: Iterable[object]) -> torch.device:
    """Return where the work is, with its number."""
    import torch

    from penstock.devices import cuda

    if given is None:
        found = {value.device for value in values if isinstance(value, torch.Tensor)}
        gpus = {device for device in found if device.type != "cpu"}  # a number on the CPU goes along with them
        if len(gpus) > 1:
            names = ", ".join(sorted(map(str, gpus)))
            raise UsageError(f"device: the arguments are on {names}; say which of them is to be timed")
        default = "cuda" if not found and cuda.has_gpu() else "cpu"
        return _device(next(iter(gpus), torch.device(default)), ())
    try:
        device = torch.device(given)
        place = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device: nothing can be timed on {given!r}: {reason}") from error
    if place.type == "meta":
        raise UsageError("device: nothing runs on meta, so there is nothing to time")
    return place
