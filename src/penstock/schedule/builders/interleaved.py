"""interleaved_1f1b: 1f1b with several stages per lane (Narayanan et al., Megatron-LM, 2021)."""

from __future__ import annotations

import numpy as np

from penstock.schedule.actions import Ints
from penstock.schedule.builders.ticks import Tick, from_ticks, one_f_one_b
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def interleaved_1f1b(*, lanes: int, micro_batches: int, stages_per_lane: int = 2) -> Schedule:
    """Micro-batches run in rounds; a lane runs a round through one of its stages, then through its next stage.

    A round has as many micro-batches as there are lanes. If the count does not divide evenly, rounds are slightly
    larger, so that no round is too small to keep the lanes busy.
    """
    sizes = _round_sizes(micro_batches, lanes)
    size_of = np.array(sizes, dtype=np.int32)
    starts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
    round_of = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def turns(nth_stage: Tick) -> Tick:
        # s stage, m micro-batch, r its round: count the earlier rounds, the earlier stages of this round, its place
        def nth(s: Ints, m: Ints) -> Ints:
            r = round_of[m]
            turn: Ints = starts[r] * stages_per_lane + nth_stage(s, m) * size_of[r] + (m - starts[r])
            return turn

        return nth

    ticks = one_f_one_b(
        warm_up=lambda s, m: 2 * (lanes - 1 - s % lanes) + (stages_per_lane - 1) * sizes[0] + 1,
        f_turn=turns(lambda s, m: s // lanes),
        b_turn=turns(lambda s, m: stages_per_lane - 1 - s // lanes),
    )
    return from_ticks("interleaved_1f1b", [loop(lanes, stages_per_lane)], num_mbs=micro_batches, ticks=ticks)


def _round_sizes(micro_batches: int, lanes: int) -> list[int]:
    num_rounds = max(1, micro_batches // lanes)
    small, larger = divmod(micro_batches, num_rounds)
    return [small + 1] * larger + [small] * (num_rounds - larger)
