"""gpipe: all forwards, then all backwards (Huang et al., GPipe, 2019); zb_gpipe: the same with a split backward."""

from __future__ import annotations

from penstock.schedule.actions import Kind
from penstock.schedule.builders.ticks import from_ticks
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def gpipe(*, lanes: int, micro_batches: int) -> Schedule:
    """Fill and drain: every lane runs all its forwards, then all its backwards."""
    ticks = {Kind.F: lambda s, m: m, Kind.B: lambda s, m: micro_batches + m}
    return from_ticks("gpipe", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)


def zb_gpipe(*, lanes: int, micro_batches: int) -> Schedule:
    """Fill and drain, but the input gradient is sent before the weight gradient is computed.

    The step takes (lanes - 1)(F + I) longer than the work of one lane; gpipe takes (lanes - 1)(F + I + W) longer. No
    schedule that runs all forwards first is faster: the last lane starts (lanes - 1) F after the first, and the first
    lane ends (lanes - 1) I after the last.
    """
    ticks = {
        Kind.F: lambda s, m: m,
        Kind.I: lambda s, m: micro_batches + 2 * m,
        Kind.W: lambda s, m: micro_batches + 2 * m + 1,
    }
    return from_ticks("zb_gpipe", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)
