"""Slowness: says once that a lane is slower than the others, when two recorded steps in a row have shown it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.faults.straggler import slow_lanes

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

__all__ = ["Slowness"]

_RATIO = 1.5  # what is less may be the cuts, which cannot be quite even
_IN_A_ROW = 2  # recorded steps: one alone may be bad luck


class Slowness:
    """What recorded steps have shown of slow lanes so far."""

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._told: set[int] = set()

    def look(self, timeline: Timeline) -> Iterator[str]:
        """Yield a sentence for each lane that has just shown itself to be slow."""
        found = [slow for slow in slow_lanes(timeline) if slow.ratio > _RATIO]
        self._times = {slow.lane: self._times.get(slow.lane, 0) + 1 for slow in found}
        for slow in found:
            if self._times[slow.lane] >= _IN_A_ROW and slow.lane not in self._told:
                self._told.add(slow.lane)
                yield f"{slow}; {_IN_A_ROW} recorded steps in a row have shown it"
