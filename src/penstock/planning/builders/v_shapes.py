"""zb_v, v_half, v_min: two stages a lane, placed as a V (Qi et al., Zero Bubble, 2024, and Controllable Memory, 2024).

Lane l holds stage l on the way there and its mirror image on the way back, so a lane that keeps one of
them long keeps the other only briefly: all lanes need the same memory, and how much follows from how
fast micro-batches hop from lane to lane. Here the forwards and input gradients have a fixed order; the
weight gradients go where there is time, within the schedule's memory.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from penstock.model.costs import Costs
from penstock.planning.memory_limits import sized, units_to_bytes
from penstock.planning.search.greedy import Problem
from penstock.planning.search.search import fill_weights, improve
from penstock.schedule.actions import Action, Ints, Kind, Lane
from penstock.schedule.builders.ticks import Tick, from_ticks
from penstock.schedule.counts import snake
from penstock.schedule.schedule import Schedule


def zb_v(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """No bubble where F, I and W take the same time, within the memory of 1f1b."""
    order = tuple(_zb_v_lane(lane, lanes, micro_batches) for lane in range(lanes))
    return _v_shape("zb_v", order, lanes, micro_batches, costs, units=lanes)


def v_half(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """About half the memory of 1f1b, and a smaller bubble."""
    order = _hops("v_half", lanes, micro_batches, there=1, back=2)
    return _v_shape("v_half", order, lanes, micro_batches, costs, units=(lanes + 2) // 2)


def v_min(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """About a third of the memory of 1f1b, and a somewhat smaller bubble."""
    # where three divides the lanes, all hops would meet in the same ticks; pauses at the turns keep them apart
    pauses = (1, 1, 2) if lanes % 3 == 0 else (0, 0, 0)
    order = _hops("v_min", lanes, micro_batches, there=1, back=1, pauses=pauses)
    return _v_shape("v_min", order, lanes, micro_batches, costs, units=(lanes + 4) // 3)


def _v_shape(
    name: str, order: tuple[Lane, ...], lanes: int, micro_batches: int, costs: Costs | None, *, units: int
) -> Schedule:
    """Fill in the weight gradients; where costs are given, improve the whole for them."""
    # their papers count a micro-batch as held until its weight gradient has run
    lane_of, stage_costs = snake(lanes, 2), sized(costs, 2 * lanes, pending_share=1.0)
    limits = units_to_bytes(units, lane_of, stage_costs)
    problem = Problem(name, lane_of, micro_batches, stage_costs, limits, order=order)
    drafts = fill_weights(problem, objective="span")
    if not drafts:  # pending values that outweigh saved ones: the order alone passes the limit
        drafts = fill_weights(replace(problem, limit_bytes=(math.inf,) * lanes), objective="span")
    best = drafts[0] if costs is None else improve(problem, drafts, objective="span") or drafts[0]
    return best.schedule


def _hops(
    name: str, lanes: int, micro_batches: int, *, there: int, back: int, pauses: tuple[int, int, int] = (0, 0, 0)
) -> tuple[Lane, ...]:
    """Return the order of forwards and input gradients that hop from lane to lane at a steady pace.

    A forward takes `there` ticks a lane on its way there and `back` on its way back, an input gradient the
    same; micro-batches follow each other every six ticks, in which a lane runs two F, two I and two W. At each
    of the three turns (forwards at the last lane, from forward to backward, input gradients at the last lane)
    a micro-batch may pause for some ticks.
    """
    turn = lanes * there + pauses[0]  # where the way back starts, counted from where the way there does
    loss = turn + (lanes - 1) * back  # when the first micro-batch reaches its last stage

    def lane_of(s: Ints) -> Ints:
        return np.where(s < lanes, s, 2 * lanes - 1 - s)

    def forward(s: Ints, m: Ints) -> Ints:
        i = lane_of(s)
        return 6 * m + np.where(s < lanes, i * there, turn + (lanes - 1 - i) * back)

    def input_grad(s: Ints, m: Ints) -> Ints:
        i = lane_of(s)
        first = 6 * m + loss + 1 + pauses[1]
        return first + np.where(s < lanes, lanes * there + pauses[2] + (lanes - 1 - i) * back, i * there)

    ticks: dict[Kind, Tick] = {Kind.I: input_grad, Kind.F: forward}
    return from_ticks(name, [snake(lanes, 2)], num_mbs=micro_batches, ticks=ticks).lanes


def _zb_v_lane(lane: int, lanes: int, micro_batches: int) -> Lane:
    """Return the order of one lane's forwards and input gradients, in five phases.

    0 stands for the lane's stage on the way there, 1 for the one on the way back:

        1  0F           2·(lanes-lane)-1 times
        2  1F 0F        lane times
        3  1F 1I        lanes-lane times
        4  0F 0I 1F 1I  until no forward is left
        5  0I 1I        until no input gradient is left
    """
    count = max(micro_batches, 2 * lanes - 1)  # the phases need this many; those beyond the count are dropped
    phases = ["0F"] * (2 * (lanes - lane) - 1) + ["1F", "0F"] * lane + ["1F", "1I"] * (lanes - lane)
    phases += ["0F", "0I", "1F", "1I"] * count + ["0I", "1I"] * count
    stages = {"0": lane, "1": 2 * lanes - 1 - lane}
    done = dict.fromkeys(("0F", "1F", "0I", "1I"), 0)
    actions = []
    for word in phases:
        mb = done[word]
        done[word] += 1
        if mb < micro_batches:
            actions.append(Action(Kind(word[1]), stages[word[0]], mb))
    return Lane.of(actions)
