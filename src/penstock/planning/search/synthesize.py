"""auto: synthesize a schedule for given costs and memory: the best of the named ones that fit and of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.model.costs import Costs, StageCosts
from penstock.planning.memory_limits import Limit, limit_per_lane, sized
from penstock.planning.search.greedy import Draft, Problem
from penstock.planning.search.search import search
from penstock.planning.simulate import simulate
from penstock.schedule.actions import Kind
from penstock.schedule.counts import loop, snake
from penstock.schedule.flow import Rows
from penstock.schedule.peak_memory import MemoryLimit, find_over_limit
from penstock.schedule.schedule import Schedule

NamedBuilder = Callable[[], Schedule]


def synthesize(
    *,
    lanes: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    stages_per_lane: int = 1,
    named: Sequence[NamedBuilder] = (),
) -> Schedule:
    """Return a schedule that is at most as long as the shortest of the named schedules that fit.

    Args:
        lanes: number of lanes.
        micro_batches: number of micro-batches.
        costs: seconds and bytes of each stage.
        memory_limit: limit for saved and pending values in bytes: one for all lanes, or one per lane.
        stages_per_lane: number of stages per lane.
        named: builders of the named schedules.

    Raises:
        ScheduleError: if nothing fits the limit; the message says what one micro-batch needs.
    """
    stage_costs = sized(costs, lanes * stages_per_lane)
    limits = limit_per_lane(memory_limit, lanes)
    limit = MemoryLimit(stage_costs.saved_bytes, stage_costs.pending_bytes, np.array(limits))
    seeds = [draft for build in named if (draft := _fitting(build, costs, limit)) is not None]
    best = seeds
    for lane_of in dict.fromkeys((loop(lanes, stages_per_lane), snake(lanes, stages_per_lane))):
        for splits in _ways_to_split(stage_costs):
            problem = Problem("auto", lane_of, micro_batches, stage_costs, limits, splits_backward=splits)
            own = [seed for seed in seeds if _is_like(seed.schedule, problem)]
            if (found := search(problem, objective="step", seeds=own)) is not None:
                best = [*best, found]
    if not best:
        raise ScheduleError(_nothing_fits(limits, stage_costs.saved_bytes, lanes))
    chosen = min(best, key=lambda draft: draft.step_seconds).schedule
    same = next((seed.schedule.name for seed in seeds if seed.schedule == chosen), "")
    return replace(chosen, name=f"auto: {same}" if same else "auto")


def _fitting(build: NamedBuilder, costs: Costs | None, limit: MemoryLimit) -> Draft | None:
    try:
        schedule = build()
    except ScheduleError:
        return None  # the schedule is not defined for these numbers
    if any(find_over_limit(schedule, Rows.of(schedule), limit)):
        return None
    timeline = simulate(schedule, costs)
    return Draft(schedule, timeline.step_seconds, max(timeline.lane_seconds))


def _ways_to_split(costs: StageCosts) -> Iterator[bool]:
    """Yield whether to split backwards: True, and also False if a full backward takes less time or memory."""
    yield True
    parts = (costs.input_grad + costs.weight_grad) * (1 - 1e-9)
    if (costs.backward < parts).any() or (costs.pending_bytes > costs.saved_bytes).any():
        yield False


def _is_like(schedule: Schedule, problem: Problem) -> bool:
    """Return whether local search on the problem can start from a schedule."""
    backward = {Kind.I, Kind.W} if problem.splits_backward else {Kind.B}
    return schedule.ways == (problem.lane_of,) and not schedule.overlaps and schedule.kinds == backward | {Kind.F}


def _nothing_fits(limits: tuple[float, ...], saved: NDArray[np.float64], lanes: int) -> str:
    per_lane = saved.reshape(-1, lanes).sum(axis=0)
    worst = int(np.argmax(per_lane / np.array(limits)))
    return (
        f"no schedule fits the memory limit; lane: {worst}, limit: {limits[worst]:.6g} bytes, "
        f"one micro-batch of its stages saves: {per_lane[worst]:.6g} bytes. "
        "Use smaller micro-batches, more lanes, or recompute"
    )
