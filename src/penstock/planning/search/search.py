"""Search: write schedules with many policies, then improve the best by local search.

The effort is counted in actions, not in seconds, so the same problem always has the same answer. docs/design/search.md
explains why this works, and how close to the optimum it gets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from penstock.planning.search.greedy import Draft, Objective, Policy, Problem, write_schedule
from penstock.planning.search.polish import polish

_WRITE_BUDGET = 1_500_000  # actions written by policies
_POLISH_BUDGET = 3_000_000  # actions timed by local search
_MOST_POLISHED = 6
_PATIENCE = (0.0, 0.5, 0.9, 0.25, 0.75, 1.0)


def search(problem: Problem, *, objective: Objective, seeds: Sequence[Draft] = ()) -> Draft | None:
    """Return the best schedule found, or None if no policy finds one that fits and there are no seeds.

    Args:
        problem: costs and limits.
        objective: what to minimise.
        seeds: schedules that are known to fit; the result is never longer than the best of them.
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


def fill_weights(problem: Problem, *, objective: Objective) -> list[Draft]:
    """Fill the gaps of the fixed order with weight gradients, for several values of patience; return the drafts."""
    drafts = (write_schedule(problem, _uniform(problem, math.inf, patience, 0.0)) for patience in _PATIENCE)
    return sorted((draft for draft in drafts if draft is not None), key=lambda draft: draft.length(objective))


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
        lanes = range(problem.num_lanes)
        yield Policy(tuple(max(1, cap[lane]) for lane in lanes), (patience,) * len(lanes), (f_patience,) * len(lanes))


def _uniform(problem: Problem, cap: float, patience: float, f_patience: float) -> Policy:
    lanes = problem.num_lanes
    return Policy((int(min(cap, problem.num_mbs)),) * lanes, (patience,) * lanes, (f_patience,) * lanes)


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
