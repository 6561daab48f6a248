"""Polish: improve a schedule by local search on its critical path.

A schedule with known costs is a job shop: the lanes are the machines. Its length is that of its longest
chain of waits, the critical path, and only swapping two neighbours of one lane on that path can shorten
it. Each round ranks these swaps by an estimate that looks at the two actions alone, makes the best one
that memory allows and that was not undone lately (a tabu list), and keeps the best schedule seen.
See docs/design/search.md.
"""

from __future__ import annotations

import math

from penstock.planning.search.greedy import Draft, Objective, Problem
from penstock.planning.search.job_shop import JobShop

__all__ = ["polish"]

_TENURE = 12  # rounds for which a swap may not be undone


def polish(problem: Problem, draft: Draft, *, objective: Objective, rounds: int, patience: int = 150) -> Draft:
    """Return the best schedule found in some rounds of local search; never a worse one.

    Args:
        problem: costs and limits.
        draft: where to start.
        objective: what to shorten.
        rounds: at most so many swaps.
        patience: stop after so many without a better schedule.
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
