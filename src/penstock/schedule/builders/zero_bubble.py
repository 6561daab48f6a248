"""zb_h1, zb_h2: 1f1b with the weight gradients moved into the bubbles (Qi et al., Zero Bubble, 2024)."""

from __future__ import annotations

from penstock.schedule.builders.ticks import from_ticks, one_f_one_b
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def zb_h1(*, lanes: int, micro_batches: int) -> Schedule:
    """1f1b, but lane s delays each weight gradient by s input gradients; a lane holds at most `lanes` micro-batches."""
    ticks = one_f_one_b(warm_up=lambda s, m: lanes - s, delay=lambda s, m: s)
    return from_ticks("zb_h1", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)


def zb_h2(*, lanes: int, micro_batches: int) -> Schedule:
    """Twice the warm-up and delay of zb_h1: no bubble within the span of a lane, at twice the memory."""
    ticks = one_f_one_b(warm_up=lambda s, m: 2 * (lanes - s) - 1, delay=lambda s, m: 2 * s)
    return from_ticks("zb_h2", [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)
