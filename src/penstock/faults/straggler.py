"""Straggler: find the lanes that compute for longer than the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from penstock.errors import UsageError
from penstock.report.timeline import Timeline
from penstock.report.units import show_seconds

_FACTOR = 1.3  # smaller differences are noise on a busy machine
_WARNED_RATIO = 1.5  # a smaller ratio may come from cuts that cannot be even
_IN_A_ROW = 2  # recorded steps; a single one may be chance


@dataclass(frozen=True)
class SlowLane:
    """A lane that takes longer than the others.

    >>> print(SlowLane(2, 1.8, 0.9, 0.5, (2,)))
    lane 2 takes 1.8 times as long as the others: 900 ms of compute per step, the others 500 ms (stage 2)
    """

    lane: int
    ratio: float  # its compute time divided by the median of the others
    seconds: float  # its compute time per step
    others_seconds: float  # the median of the others
    stages: tuple[int, ...] = ()  # that it runs
    is_as_planned: bool = False  # whether they were predicted to take longer: the cuts are the cause, not the device

    def __str__(self) -> str:
        stages = f" (stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))})"
        planned = "; its stages are planned to take longer: other cuts would balance them" if self.is_as_planned else ""
        return (
            f"lane {self.lane} takes {self.ratio:.1f} times as long as the others: "
            f"{show_seconds(self.seconds, digits=3)} of compute per step, the others "
            f"{show_seconds(self.others_seconds, digits=3)}{stages if self.stages else ''}{planned}"
        )


def slow_lanes(
    timeline: Timeline, *, factor: float = _FACTOR, expected: Timeline | None = None
) -> tuple[SlowLane, ...]:
    """Return the lanes that compute for longer than the others in a step, the slowest first.

    Waiting does not count: lanes that wait for a slow lane are not slow.

    Args:
        timeline: the timeline of a step, from `pipe.record()`.
        factor: the smallest ratio to report, compared with the median of the others.
        expected: the predicted step (`pipe.explain().timeline`), to tell slow devices from uneven cuts.

    Raises:
        UsageError: if the prediction has another number of lanes.
    """
    if expected is not None and expected.num_lanes != timeline.num_lanes:
        raise UsageError(f"expected: has {expected.num_lanes} lanes, but the timeline has {timeline.num_lanes}")
    busy = timeline.busy_seconds
    planned = None if expected is None else _ratios(expected.busy_seconds)
    found = []
    for lane, ratio in enumerate(_ratios(busy)):
        if ratio >= factor:
            others = median(seconds for other, seconds in enumerate(busy) if other != lane)
            stages = tuple(sorted({int(stage) for stage in timeline.stage[timeline.lane == lane]}))
            is_planned = planned is not None and ratio < factor * planned[lane]
            found.append(SlowLane(lane, ratio, busy[lane], others, stages, is_planned))
    return tuple(sorted(found, key=lambda slow: -slow.ratio))


def _ratios(seconds: tuple[float, ...]) -> list[float]:
    """Return each lane's time divided by the median of the others."""
    if len(seconds) < 2:
        return [1.0] * len(seconds)
    of_others = [median(s for other, s in enumerate(seconds) if other != lane) for lane in range(len(seconds))]
    return [own / other if other > 0 else 1.0 for own, other in zip(seconds, of_others, strict=True)]


class SlowLaneWarning:
    """Reports once that a lane is slower than the others, after two recorded steps in a row."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._told: set[int] = set()

    def check(self, timeline: Timeline) -> Iterator[str]:
        """Yield a message for each lane that is now known to be slow."""
        found = [slow for slow in slow_lanes(timeline) if slow.ratio > _WARNED_RATIO]
        self._times = {slow.lane: self._times.get(slow.lane, 0) + 1 for slow in found}
        for slow in found:
            if self._times[slow.lane] >= _IN_A_ROW and slow.lane not in self._told:
                self._told.add(slow.lane)
                yield f"{slow}; seen in {_IN_A_ROW} recorded steps in a row"
