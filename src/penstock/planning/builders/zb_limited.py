"""zb_1p, zb_2p: zero-bubble schedules made for given costs and a memory limit (Qi et al., Zero Bubble, 2024)."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.model.costs import Costs
from penstock.planning.memory_limits import sized, units_to_bytes
from penstock.planning.search.greedy import Problem
from penstock.planning.search.search import search
from penstock.schedule.counts import loop
from penstock.schedule.schedule import Schedule


def zb_1p(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """The shortest schedule that the search finds if each lane holds at most `lanes` micro-batches."""
    return _limited("zb_1p", lanes, micro_batches, costs, units=lanes)


def zb_2p(*, lanes: int, micro_batches: int, costs: Costs | None = None) -> Schedule:
    """Like zb_1p, with twice the memory."""
    return _limited("zb_2p", lanes, micro_batches, costs, units=2 * lanes)


def _limited(name: str, lanes: int, micro_batches: int, costs: Costs | None, *, units: int) -> Schedule:
    stage_costs, lane_of = sized(costs, lanes), loop(lanes, 1)
    problem = Problem(name, lane_of, micro_batches, stage_costs, units_to_bytes(units, lane_of, stage_costs))
    draft = search(problem, objective="span")
    if draft is None:
        raise ScheduleError(f"{name}: no schedule fits: pending_bytes is too large compared with saved_bytes")
    return draft.schedule
