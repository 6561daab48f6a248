"""gpipe: all forwards, then all backwards (Huang et al., GPipe, 2019)."""

from __future__ import annotations

from penstock.schedule.actions import Kind
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule
from penstock.schedule.ticks import from_ticks


def gpipe(*, lanes: int, micro_batches: int) -> Schedule:
    """Fill and drain: every lane runs all its forwards, then all its backwards."""
    ticks = {Kind.F: lambda s, m: m, Kind.B: lambda s, m: micro_batches + m}
    return from_ticks("gpipe", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)
