"""Search: write schedules with many policies, and improve the best by local search; `synthesize` makes `auto`.

The effort is counted in actions, not in seconds, so the same problem always has the same answer. docs/design/search.md
explains why this works, and how close to the optimum it gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from penstock.errors import ScheduleError
from penstock.model.costs import Costs, StageCosts
from penstock.planning.memory_limits import Limit, limit_per_lane, sized
from penstock.planning.search.greedy import Draft, Objective, Policy, Problem, write_schedule
from penstock.planning.search.job_shop import JobShop
from penstock.planning.simulate import simulate
from penstock.schedule.actions import Kind
from penstock.schedule.counts import loop, snake
from penstock.schedule.flow import Rows
from penstock.schedule.peak_memory import MemoryLimit, find_over_limit
from penstock.schedule.schedule import Schedule

_WRITE_BUDGET = 1_500_000  # actions written by policies
_POLISH_BUDGET = 3_000_000  # actions timed by local search
_MOST_POLISHED = 6
_TENURE = 12  # rounds for which a swap may not be undone
_MOST_IDLE = 150  # swaps without improvement after which local search stops
_PATIENCE = (0.0, 0.5, 0.9, 0.25, 0.75, 1.0)


def synthesize(
    lanes: int,
    micro_batches: int,
    costs: Costs | None,
    memory_limit: Limit | None,
    *,
    stages_per_lane: int,
    named: Sequence[Callable[[], Schedule]],
) -> Schedule:
    """Return a schedule that is at most as long as the shortest of the named schedules that fit.

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
        per_lane = stage_costs.saved_bytes.reshape(-1, lanes).sum(axis=0)
        worst = int(np.argmax(per_lane / np.array(limits)))
        raise ScheduleError(
            f"no schedule fits the memory limit; lane: {worst}, limit: {limits[worst]:.6g} bytes, "
            f"one micro-batch of its stages saves: {per_lane[worst]:.6g} bytes. "
            "Use smaller micro-batches, more lanes, or recompute"
        )
    chosen = min(best, key=lambda draft: draft.step_seconds).schedule
    same = next((seed.schedule.name for seed in seeds if seed.schedule == chosen), "")
    return replace(chosen, name=f"auto: {same}" if same else "auto")


def _fitting(build: Callable[[], Schedule], costs: Costs | None, limit: MemoryLimit) -> Draft | None:
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


def search(problem: Problem, *, objective: Objective, seeds: Sequence[Draft] = ()) -> Draft | None:
    """Return the best schedule found, or None if no policy finds one that fits and there are no seeds.

    Seeds are schedules that are known to fit. The result is never longer than the best of them.
    """
    num_actions = (3 if problem.splits_backward else 2) * len(problem.lane_of) * problem.num_mbs
    budget = max(6, _WRITE_BUDGET // num_actions)
    written = [write_schedule(problem, policy) for policy, _ in zip(policies(problem), range(budget), strict=False)]
    return improve(problem, [*seeds, *(draft for draft in written if draft is not None)], objective=objective)


def improve(problem: Problem, drafts: Sequence[Draft], *, objective: Objective) -> Draft | None:
    """Improve the best few drafts by local search, and return the best result."""
    distinct = {draft.schedule: draft for draft in sorted(drafts, key=lambda draft: -draft.length(objective))}
    ranked = sorted(distinct.values(), key=lambda draft: draft.length(objective))
    if not ranked:
        return None
    num_actions = ranked[0].schedule.num_actions
    chosen = ranked[: max(1, min(_MOST_POLISHED, _POLISH_BUDGET // (50 * num_actions)))]
    rounds = min(1000, _POLISH_BUDGET // (num_actions * len(chosen)))
    polished = [polish(problem, draft, objective=objective, rounds=rounds) for draft in chosen]
    return min([*ranked[:1], *polished], key=lambda draft: draft.length(objective))


def polish(problem: Problem, draft: Draft, *, objective: Objective, rounds: int) -> Draft:
    """Return the best schedule that local search finds in some rounds; it is never worse than the draft.

    A schedule with known costs is a job shop whose machines are the lanes. Its length is that of its longest chain of
    waits, the critical path. Only swapping two neighbours of one lane on this path can shorten it. Each round ranks
    these swaps by an estimate that considers the two actions only. It makes the best swap that memory and a tabu list
    of recent swaps allow, and keeps the best schedule so far.
    """
    shop = JobShop(problem, draft.schedule, objective)
    best, best_order, idle = shop.run(), [*map(list, shop.order)], 0
    tabu: dict[tuple[int, int], int] = {}
    for turn in range(rounds):
        move = shop.best_swap({pair for pair, until in tabu.items() if until > turn}, best)
        if move is None or idle >= _MOST_IDLE:
            break
        tabu[move[1], move[0]] = turn + _TENURE
        shop.swap(*move)
        length = shop.run()
        idle += 1
        if math.isinf(length):  # the two depend on each other through actions that take no time
            shop.barred.add(move)
            shop.swap(*reversed(move))
            shop.run()  # since the times are inconsistent
            continue
        if length < best * (1 - 1e-9):
            best, best_order, idle = length, [*map(list, shop.order)], 0
    return shop.draft(best_order)


def fill_weights(problem: Problem) -> list[Draft]:
    """Fill the gaps of the fixed order with weight gradients, for several values of patience; return the drafts."""
    policies = (Policy((problem.num_mbs,) * problem.num_lanes, patience, 0.0) for patience in _PATIENCE)
    drafts = (write_schedule(problem, policy) for policy in policies)
    return sorted((draft for draft in drafts if draft is not None), key=lambda draft: draft.span_seconds)


def policies(problem: Problem) -> Iterator[Policy]:
    """Yield policies, the most promising first.

    The natural cap costs no time: the number of forwards that a lane can run before its first backward can arrive.
    Smaller caps save memory; larger caps bridge delays.
    """
    natural = _natural_caps(problem)
    ahead = _lanes_behind(problem)
    caps = [
        [math.floor(n + 1) for n in natural],
        [math.floor(n + 1.5) for n in natural],
        [a + 1 for a in ahead],
        [math.floor(n + 2) for n in natural],
        [2 * a + 1 for a in ahead],
        [2 * a + 2 for a in ahead],
        [math.floor(n + 3) for n in natural],
        [math.ceil(1.5 * a) + 1 for a in ahead],
        [math.floor(1.1 * n + 1) for n in natural],
        [problem.num_mbs] * problem.num_lanes,
    ]
    for f_patience, patience, cap in product((0.0, 0.5, 1.0), _PATIENCE, caps):
        yield Policy(tuple(max(1, number) for number in cap), patience, f_patience)


def _lanes_behind(problem: Problem) -> list[int]:
    """Return for each lane the number of stages after its first one, divided by the stages per lane."""
    stages_per_lane = len(problem.lane_of) / problem.num_lanes
    firsts = [problem.lane_of.index(lane) for lane in range(problem.num_lanes)]
    return [math.ceil((len(problem.lane_of) - 1 - first) / stages_per_lane) for first in firsts]


def _natural_caps(problem: Problem) -> list[float]:
    """Return how many forwards fit between the first forward of a lane and the first backward that can follow."""
    costs, num_stages = problem.costs, len(problem.lane_of)
    back = costs.input_grad if problem.splits_backward else costs.backward
    crosses = [problem.lane_of[s] != problem.lane_of[s + 1] for s in range(num_stages - 1)]
    away = [0.0] * num_stages  # from the end of the forward of a stage to the arrival of its gradient
    for s in reversed(range(num_stages - 1)):
        lag = 2 * costs.transfer[s] * crosses[s]
        away[s] = float(away[s + 1] + costs.forward[s + 1] + back[s + 1] + lag)
    caps = []
    for lane in range(problem.num_lanes):
        first = problem.lane_of.index(lane)
        own = sum(float(costs.forward[s]) for s in range(num_stages) if problem.lane_of[s] == lane)
        caps.append(away[first] / own if own else float(num_stages))
    return caps
