"""Timing: measure reliably how long a call takes on a GPU."""

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

_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_SHORT_SECONDS = 50e-6  # shorter calls are timed in bursts, since two events alone are some microseconds apart
_DOUBTFUL_SECONDS = 1e-3  # a measured time below this may be the time of a slow host instead of that of the call
_MOST_CALLS = 64  # per burst: a queue holds about a thousand kernels
# if launching takes longer, the kernels do not fit in the queue and the host cannot run ahead
_MOST_AHEAD_SECONDS = 0.1
_FLUSH_BYTES = 256 * 2**20  # more than the caches of any GPU


@dataclass(frozen=True)
class Measurement:
    """The times of several runs, in seconds.

    >>> found = Measurement((0.00131, 0.0012, 0.00123))
    >>> found.median, found.low, found.high
    (0.00123, 0.0012, 0.00131)
    >>> print(found)
    1.23 ms (1.20-1.31), 3 runs
    """

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median time."""
        return statistics.median(self.times)

    @property
    def low(self) -> float:
        """The time of the fastest run."""
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
    *args: Any,  # noqa: ANN401 - the arguments of the function
    repeats: int = 10,
    warm: int = 3,
    device: torch.device | str | None = None,
    flush_cache: bool = False,
    host: bool = False,
    **kwargs: Any,  # noqa: ANN401
) -> Measurement:
    """Return how long `fn(*args, **kwargs)` takes.

    On a GPU, the clock of the GPU measures from the start of the work of a call to its end. The GPU first gets other
    work, so that the host runs ahead and the launches are not part of the time. With `host`, the clock of the host
    measures from the call until the GPU is idle again. On a CPU, both are the same.

    GPU calls shorter than 50 µs are timed in bursts, and each time is the mean of one burst.

    Args:
        fn: the function to time. It may run more often than `warm` and `repeats` say. Only work on the current stream
            is measured.
        args: the positional arguments of the function.
        repeats: number of timed runs.
        warm: number of untimed runs before them, which load kernels, choose algorithms and allocate memory.
        device: the device of the work. The default is the device of the tensors among the arguments. Without tensors,
            it is the current GPU, or the CPU if there is no GPU.
        flush_cache: whether to empty the caches of the device before each run, as other work would do.
        host: whether to include the work of the host.
        kwargs: the keyword arguments of the function. If one has the name of an argument of `measure`, wrap `fn` in a
            lambda.

    Raises:
        UsageError: if an argument is invalid, or if the function gives the GPU no work.

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
            f"{where}: the function gave it no work on its current stream; for work on the CPU pass device='cpu', and"
            " to include the work of the host pass host=True"
        )
    return Measurement(tuple(times))


def _burst(clock: Clock, call: Call, device: torch.device, *, one_at_a_time: bool) -> tuple[int, float]:
    """Return the number of calls per burst, and the seconds for which the device waits while the host launches them."""
    if device.type != "cuda":
        return 1, 0.0
    looks = [clock.time(call, 1)]
    if _SHORT_SECONDS <= looks[0].device < _DOUBTFUL_SECONDS:  # the device may have waited for a slow host
        looks.append(clock.time(call, 1, ahead_seconds=min(2 * looks[0].host, _MOST_AHEAD_SECONDS)))
    host = min(look.host for look in looks)
    count = 1
    if not one_at_a_time and min(look.device for look in looks) < _SHORT_SECONDS:
        count = _MOST_CALLS
    ahead = 2 * host * count  # twice, since the time varies between runs
    if ahead > _MOST_AHEAD_SECONDS:
        count, ahead = 1, 2 * host
    return count, ahead if ahead <= _MOST_AHEAD_SECONDS else 0.0


def _check(fn: object, **counts: int) -> None:
    faults = []
    if not callable(fn):
        faults.append(f"fn: {type(fn).__name__} cannot be called; to time an expression, write lambda: before it")
    for (name, number), least in zip(counts.items(), (1, 0), strict=True):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            faults.append(f"{name}: {number!r} must be a whole number, {least} or more")
    if faults:
        raise UsageError("; ".join(faults))


def _device(given: torch.device | str | None, values: Iterable[object]) -> torch.device:
    """Return the device of the work, with its index."""
    import torch

    from penstock.devices import cuda

    if given is None:
        found = {value.device for value in values if isinstance(value, torch.Tensor)}
        gpus = {device for device in found if device.type != "cpu"}  # scalars on the CPU are allowed
        if len(gpus) > 1:
            names = ", ".join(sorted(map(str, gpus)))
            raise UsageError(f"device: the arguments are on {names}; pass the one to time")
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
