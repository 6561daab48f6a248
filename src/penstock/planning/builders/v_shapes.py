"""zb_v, v_half, v_min: two stages per lane, placed as a V (Qi et al., Zero Bubble and Controllable Memory, 2024).

Lane l has stage l on the way out and its mirror image on the way back. A lane that keeps the values of one stage long
keeps those of the other only briefly, so all lanes need the same memory. The amount depends on how fast micro-batches
move from lane to lane. Forwards and input gradients have a fixed order here. Weight gradients fill the gaps, within
the memory of the schedule.
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
    """No bubble if F, I and W take the same time; needs the memory of 1f1b."""
    order = tuple(_zb_v_lane(lane, lanes, micro_batches) for lane in range(lanes))
    return _v_shape("zb_v", order, lanes, micro_batches, costs, units=lanes)


def v_half(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """About half the memory of 1f1b, with a smaller bubble."""
    order = _hops("v_half", lanes, micro_batches, there=1, back=2)
    return _v_shape("v_half", order, lanes, micro_batches, costs, units=(lanes + 2) // 2)


def v_min(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """About a third of the memory of 1f1b, with a slightly smaller bubble."""
    # if the number of lanes is a multiple of 3, all moves would fall on the same ticks; pauses at the turns avoid this
    pauses = (1, 1, 2) if lanes % 3 == 0 else (0, 0, 0)
    order = _hops("v_min", lanes, micro_batches, there=1, back=1, pauses=pauses)
    return _v_shape("v_min", order, lanes, micro_batches, costs, units=(lanes + 4) // 3)


def _v_shape(
    name: str, order: tuple[Lane, ...], lanes: int, micro_batches: int, costs: Costs | None, *, units: int
) -> Schedule:
    """Fill in the weight gradients; if costs are given, improve the schedule for them."""
    # the papers count a micro-batch as held until its weight gradient has run
    lane_of, stage_costs = snake(lanes, 2), sized(costs, 2 * lanes, pending_share=1.0)
    limits = units_to_bytes(units, lane_of, stage_costs)
    problem = Problem(name, lane_of, micro_batches, stage_costs, limits, order=order)
    drafts = fill_weights(problem)
    if not drafts:  # pending values are larger than saved values: the order alone exceeds the limit
        drafts = fill_weights(replace(problem, limit_bytes=(math.inf,) * lanes))
    best = drafts[0] if costs is None else improve(problem, drafts, objective="span") or drafts[0]
    return best.schedule


def _hops(
    name: str, lanes: int, micro_batches: int, *, there: int, back: int, pauses: tuple[int, int, int] = (0, 0, 0)
) -> tuple[Lane, ...]:
    """Return the order of forwards and input gradients that move from lane to lane at a steady pace.

    A forward takes `there` ticks per lane on the way out and `back` ticks per lane on the way back; an input gradient
    takes the same. A micro-batch starts every six ticks, in which a lane runs two F, two I and two W. A micro-batch may
    pause at each of the three turns: forwards at the last lane, forward to backward, input gradients at the last lane.
    """
    turn = lanes * there + pauses[0]  # tick at which the way back starts
    loss = turn + (lanes - 1) * back  # tick at which the first micro-batch reaches its last stage

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
    """Return the order of the forwards and input gradients of one lane, in five phases.

    0 is the stage of the lane on the way out, 1 its stage on the way back:

        1  0F           2·(lanes-lane)-1 times
        2  1F 0F        lane times
        3  1F 1I        lanes-lane times
        4  0F 0I 1F 1I  until no forward is left
        5  0I 1I        until no input gradient is left
    """
    count = max(micro_batches, 2 * lanes - 1)  # the phases need this many; surplus micro-batches are dropped
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
