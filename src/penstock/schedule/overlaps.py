"""Overlaps: where the pairs of neighbours that run at the same time stand among the rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import KIND_INDEX, Ints, Kind
from penstock.schedule.flow import NONE, Rows
from penstock.schedule.schedule import Schedule

__all__ = ["BUILT", "find_bad_overlaps", "pair_rows", "wait_together"]

# the kinds that a schedule has as built; lowering adds the others
BUILT = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)


def pair_rows(schedule: Schedule, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the first and of the second of each pair, in a schedule's rows, built or lowered."""
    if not schedule.overlaps:
        none = np.empty(0, dtype=np.int64)
        return none, none
    place = np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in BUILT]))
    starts = np.cumsum([0] + [len(lane) for lane in schedule.lanes])
    first = np.array(sorted(starts[lane] + index for lane, index in schedule.overlaps), dtype=np.int64)
    return place[first], place[first + 1]


def wait_together(needs: Ints, first: NDArray[np.int64], second: NDArray[np.int64]) -> Ints:
    """Return needs in which the first of each pair also waits for what the second needs: they start together."""
    if not len(first):
        return needs
    width = needs.shape[1]
    both = np.full((len(needs), 2 * width), NONE, dtype=np.int32)
    both[:, :width] = needs
    both[first, width:] = needs[second]
    return both


def find_bad_overlaps(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, index, message) for pairs that cannot be; the forward stands first, so that it is counted first."""
    taken: set[tuple[int, int]] = set()
    for lane, index in sorted(schedule.overlaps):
        if not 0 <= lane < schedule.num_lanes or not 0 <= index < len(schedule.lanes[lane]) - 1:
            near = min(max(lane, 0), schedule.num_lanes - 1)
            yield near, -1, f"an overlap starts at action {index} of lane {lane}, which has no neighbour behind it"
            continue
        pair = schedule.lanes[lane][index], schedule.lanes[lane][index + 1]
        if {(lane, index), (lane, index + 1)} & taken:
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but one of them overlaps another action too"
        if pair[0].kind is not Kind.F or pair[1].kind not in (Kind.B, Kind.I):
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but only a forward and a backward behind it can"
        taken |= {(lane, index), (lane, index + 1)}
