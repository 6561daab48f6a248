"""Slow lane warning: reports once that a lane is slower than the others, after two recorded steps in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.faults.straggler import slow_lanes

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

_RATIO = 1.5  # a smaller ratio may come from cuts that cannot be even
_IN_A_ROW = 2  # recorded steps; a single one may be chance


class SlowLaneWarning:
    """Counts how often recorded steps showed a slow lane."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._told: set[int] = set()

    def check(self, timeline: Timeline) -> Iterator[str]:
        """Yield a message for each lane that is now known to be slow."""
        found = [slow for slow in slow_lanes(timeline) if slow.ratio > _RATIO]
        self._times = {slow.lane: self._times.get(slow.lane, 0) + 1 for slow in found}
        for slow in found:
            if self._times[slow.lane] >= _IN_A_ROW and slow.lane not in self._told:
                self._told.add(slow.lane)
                yield f"{slow}; seen in {_IN_A_ROW} recorded steps in a row"
