"""hanayo: 1f1b in waves; stages go back and forth over the lanes (Liu et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.model.costs import Costs
from penstock.planning.search.greedy import Policy, Problem, write_schedule
from penstock.planning.search.search import improve
from penstock.schedule.counts import snake
from penstock.schedule.schedule import Schedule


def hanayo(*, lanes: int, micro_batches: int, stages_per_lane: int = 2) -> Schedule:
    """A wave passes each lane twice; a lane runs a backward whenever one is ready, and otherwise its latest forward.

    The paper defines the order for as many micro-batches as lanes. For more micro-batches, the search chooses how far
    forwards may run ahead, for a backward that takes twice as long as its forward.
    """
    if stages_per_lane % 2:
        near = f"{stages_per_lane - 1} or {stages_per_lane + 1}" if stages_per_lane > 1 else "2"
        raise ScheduleError(
            f"hanayo's waves pass a lane twice, so stages per lane must be even; stages per lane: {stages_per_lane}, "
            f"use {near}"
        )
    costs = Costs(forward=1.0, backward=2.0).for_stages(lanes * stages_per_lane)
    lane_of = snake(lanes, stages_per_lane)
    problem = Problem("hanayo", lane_of, micro_batches, costs, (float("inf"),) * lanes, splits_backward=False)
    drafts = [draft for policy in _policies(lanes) if (draft := write_schedule(problem, policy)) is not None]
    best = improve(problem, drafts, objective="step")
    if best is None:
        raise RuntimeError("found no schedule, although there is no memory limit")
    return best.schedule


def _policies(lanes: int) -> Iterator[Policy]:
    """Yield limits of forwards ahead, from half the number of lanes to twice that number; earlier lanes have more."""
    for quarters in range(2, 9):
        for slope in (0.5, 1.0):
            caps = (max(1, int(quarters * lanes / 4 + slope * (lanes - 1 - lane))) for lane in range(lanes))
            yield Policy(tuple(caps), patience=0.0, f_patience=0.0)
