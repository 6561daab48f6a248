"""Polishing: improve a schedule by local search on its critical path.

A schedule with known costs is a job shop whose machines are the lanes. Its length is that of its longest chain of
waits, the critical path. Only swapping two neighbours of one lane on this path can shorten it. Each round ranks these
swaps by an estimate that considers the two actions only. It makes the best swap that memory and a tabu list of recent
swaps allow, and keeps the best schedule so far. See docs/design/search.md.
"""

from __future__ import annotations

import math

from penstock.planning.search.greedy import Draft, Objective, Problem
from penstock.planning.search.job_shop import JobShop

_TENURE = 12  # rounds for which a swap may not be undone


def polish(problem: Problem, draft: Draft, *, objective: Objective, rounds: int, patience: int = 150) -> Draft:
    """Return the best schedule that local search finds; it is never worse than the draft.

    Args:
        problem: costs and limits.
        draft: the schedule to start from.
        objective: what to minimise.
        rounds: maximum number of swaps.
        patience: number of swaps without improvement after which the search stops.
    """
    shop = JobShop(problem, draft.schedule, objective)
    best, best_order, idle = shop.run(), shop.snapshot(), 0
    tabu: dict[tuple[int, int], int] = {}
    for turn in range(rounds):
        move = shop.best_swap({pair for pair, until in tabu.items() if until > turn}, best)
        if move is None or idle >= patience:
            break
        tabu[move[1], move[0]] = turn + _TENURE
        shop.swap(*move)
        length = shop.run()
        idle += 1
        if math.isinf(length):  # the two depend on each other through actions that take no time
            shop.bar(*move)
            continue
        if length < best * (1 - 1e-9):
            best, best_order, idle = length, shop.snapshot(), 0
    return shop.draft(best_order)
