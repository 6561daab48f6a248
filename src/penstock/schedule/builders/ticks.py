"""Ticks: build a schedule from the time of each action; each lane runs its actions in the order of time.

For each kind, a builder passes a function of (stage, micro-batch) that returns a tick, an integer. Only the order
of the ticks within a lane matters, so a builder may use the lock-step picture of a paper or any other numbers that
sort correctly. A schedule that can run still can if whole micro-batches are dropped. Therefore each builder based
on ticks accepts any number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.schedule.actions import Ints, Kind, Lane, encode
from penstock.schedule.schedule import Schedule

# (stages as a column, micro-batches as a row) -> a tick for each pair
Tick = Callable[[Ints, Ints], Ints]


def from_ticks(name: str, ways: Sequence[Sequence[int]], *, num_mbs: int, ticks: Mapping[Kind, Tick]) -> Schedule:
    """Return the schedule whose lanes run their actions in the order of ticks; in a tie, the first kind runs first."""
    placed = tuple(tuple(way) for way in ways)
    num_lanes = 1 + max(max(way) for way in placed)
    lanes = []
    for lane in range(num_lanes):
        codes, keys = [], []
        for way, lane_of in enumerate(placed):
            stages = np.array([s for s, home in enumerate(lane_of) if home == lane], dtype=np.int32)[:, None]
            mbs = np.arange(way, num_mbs, len(placed), dtype=np.int32)[None, :]
            for kind, tick in ticks.items():
                codes.append(np.broadcast_to(encode(kind, stages, mbs), (stages.size, mbs.size)).ravel())
                keys.append(np.broadcast_to(tick(stages, mbs), (stages.size, mbs.size)).ravel())
        lanes.append(Lane(np.concatenate(codes)[np.argsort(np.concatenate(keys), kind="stable")]))
    return Schedule(tuple(lanes), placed, num_mbs, name=name)


def one_f_one_b(
    *, warm_up: Tick, delay: Tick | None = None, f_turn: Tick | None = None, b_turn: Tick | None = None
) -> dict[Kind, Tick]:
    """Return the ticks of one forward, one backward in turn, after a warm-up of forwards.

    Args:
        warm_up: number of forwards that a lane runs before its first backward.
        delay: number of further backwards before a weight gradient runs; None: backwards are not split.
        f_turn: the index of a forward among the forwards of its lane (default: its micro-batch).
        b_turn: the same for a backward.
    """
    nth_f = f_turn or (lambda s, m: m)
    nth_b = b_turn or (lambda s, m: m)
    ticks: dict[Kind, Tick] = {
        Kind.I if delay else Kind.B: lambda s, m: 3 * nth_b(s, m),
        Kind.F: lambda s, m: 3 * (nth_f(s, m) - warm_up(s, m)) + 1,
    }
    if delay is not None:
        ticks[Kind.W] = lambda s, m: 3 * (nth_b(s, m) + delay(s, m)) + 2
    return ticks
