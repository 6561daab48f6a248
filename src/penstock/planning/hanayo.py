"""hanayo: 1f1b in waves: stages go there and back over the lanes, as often as asked (Liu et al., 2023)."""

from __future__ import annotations

from itertools import islice

from penstock.errors import ScheduleError
from penstock.model.costs import Costs
from penstock.planning.greedy import Problem, write_schedule
from penstock.planning.search import policies
from penstock.schedule.counts import snake
from penstock.schedule.schedule import Schedule

_NUM_CAPS = 10  # policies differ first in their caps; the rest is about weight gradients, which are not apart here


def hanayo(*, lanes: int, micro_batches: int, stages_per_lane: int = 2) -> Schedule:
    """A wave passes every lane twice; a lane runs a backward whenever one is ready, else its latest forward.

    How many forwards a lane may be ahead is what makes the step shortest for a backward of two forwards.
    """
    if stages_per_lane % 2:
        near = f"{stages_per_lane - 1} or {stages_per_lane + 1}" if stages_per_lane > 1 else "2"
        raise ScheduleError(
            f"hanayo's waves pass a lane twice, so stages per lane must be even; stages per lane: {stages_per_lane}, "
            f"{near} would do"
        )
    costs = Costs(forward=1.0, backward=2.0).for_stages(lanes * stages_per_lane)
    lane_of = snake(lanes, stages_per_lane)
    problem = Problem("hanayo", lane_of, micro_batches, costs, (float("inf"),) * lanes, splits_backward=False)
    drafts = [write_schedule(problem, policy) for policy in islice(policies(problem), _NUM_CAPS)]
    return min((draft for draft in drafts if draft is not None), key=lambda draft: draft.step_seconds).schedule
