"""Overlaps: the positions of pairs of neighbouring actions that run at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import KIND_INDEX, Ints, Kind
from penstock.schedule.flow import NONE, Rows
from penstock.schedule.schedule import Schedule

# the kinds of a schedule as built; lowering adds the others
BUILT = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)


def pair_rows(schedule: Schedule, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the first and the second action of each pair; rows may be built or lowered."""
    if not schedule.overlaps:
        none = np.empty(0, dtype=np.int64)
        return none, none
    place = np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in BUILT]))
    starts = np.cumsum([0] + [len(lane) for lane in schedule.lanes])
    first = np.array(sorted(starts[lane] + index for lane, index in schedule.overlaps), dtype=np.int64)
    return place[first], place[first + 1]


def wait_together(needs: Ints, first: NDArray[np.int64], second: NDArray[np.int64]) -> Ints:
    """Let the first action of each pair also wait for the needs of the second, so that both start together."""
    if not len(first):
        return needs
    width = needs.shape[1]
    joined = np.full((len(needs), 2 * width), NONE, dtype=np.int32)
    joined[:, :width] = needs
    joined[first, width:] = needs[second]
    return joined


def find_bad_overlaps(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, index, message) for invalid pairs; the forward must come first, since it is counted first."""
    taken: set[tuple[int, int]] = set()
    for lane, index in sorted(schedule.overlaps):
        if not 0 <= lane < schedule.num_lanes or not 0 <= index < len(schedule.lanes[lane]) - 1:
            near = min(max(lane, 0), schedule.num_lanes - 1)
            yield near, -1, f"an overlap starts at action {index} of lane {lane}, but no action follows there"
            continue
        pair = schedule.lanes[lane][index], schedule.lanes[lane][index + 1]
        if {(lane, index), (lane, index + 1)} & taken:
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but one of them also overlaps another action"
        if pair[0].kind is not Kind.F or pair[1].kind not in (Kind.B, Kind.I):
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but only a forward followed by a backward can overlap"
        taken |= {(lane, index), (lane, index + 1)}
