"""looped_bfs: breadth first, all micro-batches through one stage, then the lane's next (Lamy-Poirier, 2023)."""

from __future__ import annotations

from penstock.schedule.actions import Kind
from penstock.schedule.builders.ticks import from_ticks
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def looped_bfs(*, lanes: int, micro_batches: int, stages_per_lane: int = 2) -> Schedule:
    """All forwards stage by stage, then all backwards stage by stage."""
    num_stages = lanes * stages_per_lane
    ticks = {
        Kind.F: lambda s, m: s * micro_batches + m,
        Kind.B: lambda s, m: (2 * num_stages - 1 - s) * micro_batches + m,
    }
    return from_ticks("looped_bfs", [loop(lanes, stages_per_lane)], num_mbs=micro_batches, ticks=ticks)
