"""1f1b: one forward, one backward in turn (PipeDream-Flush, Narayanan et al., 2021)."""

from __future__ import annotations

from penstock.schedule.builders.ticks import from_ticks, one_f_one_b
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def build_1f1b(*, lanes: int, micro_batches: int) -> Schedule:
    """Lane s warms up with lanes - s forwards, then alternates; it never holds more than lanes - s micro-batches."""
    ticks = one_f_one_b(warm_up=lambda s, m: lanes - s)
    return from_ticks("1f1b", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)
