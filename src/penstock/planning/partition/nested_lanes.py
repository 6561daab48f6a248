"""Nested lanes: the exact optimum without memory limits if stage s shares its lanes with stage num_stages - 1 - s.

This is the case in V shapes and in bidirectional schedules. Pairs of stages are placed from the outside in; the time
of a pair depends only on its four ends. See docs/design/partition.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.planning.partition.cut_problem import Problem
from penstock.schedule.actions import Floats

Grid = NDArray[np.bool_]

_MOST = 6_000_000  # maximum of positions² × pairs, which each round examines
_NEAR = 1e-10
_STOPS = 64


@dataclass(frozen=True, eq=False)
class _Pair:
    """A stage and its mirror image. The left stage lies between a and i, the right one between j and b.

    Their time is left_enter[a] + left_leave[i] + right_enter[j] + right_leave[b].
    """

    left_enter: Floats
    left_leave: Floats
    right_enter: Floats
    right_leave: Floats
    floor: Floats | None  # [i, j] how long the wires of the two inner cuts are busy


def solve_nested(problem: Problem) -> tuple[list[int], float] | None:
    """Return the best cuts without memory limits and a lower bound of their period; None if stages do not nest."""
    num_pairs = problem.num_stages // 2
    if problem.forced or len(problem.positions) ** 2 * num_pairs > _MOST:
        return None
    pairs = _pairs(problem)
    if pairs is None:
        return None
    low = float(problem.seconds[-1] / problem.speeds.sum())
    high, cuts = np.inf, None
    share = 2.0**-7
    while not np.isfinite(high) or high - low > _NEAR * high:
        limit = (low + high) / 2 if np.isfinite(high) else low * (1 + share) + 1e-300
        reached = _reach(pairs, problem, limit)
        if reached is None:
            low, share = limit, share * 4
            if share > 2.0**_STOPS:
                return None
            continue
        cuts = _trace(pairs, problem, reached, limit)
        high = min(limit, problem.period(cuts))
    return None if cuts is None else (cuts, low)


def _pairs(problem: Problem) -> list[_Pair] | None:
    """Return the pairs from the outside in; with an odd number of stages, the last is a single stage."""
    last, homes = problem.num_stages - 1, [problem.share_of(s) for s in range(problem.num_stages)]
    seen: set[int] = set()
    wires: set[object] = set()
    found = []
    for left in range((problem.num_stages + 1) // 2):
        right = last - left
        rate = _rate(problem, homes[left], homes[right])
        mine = _wires(problem, left, right)
        if rate is None or seen & set(homes[left]) or wires & set(mine):
            return None
        seen |= set(homes[left])
        wires |= set(mine)
        work = rate * problem.seconds
        half = [_half(problem, cut) for cut in (left - 1, left, right - 1, right)]
        floor = None
        if mine:
            floor = np.zeros((len(work), len(work)))
            for i_cost, j_cost in mine.values():
                floor = np.maximum(floor, i_cost[:, None] + j_cost[None])
        found.append(_Pair(half[0] - work, half[1] + work, half[2] - work, half[3] + work, floor))
    return found


def _rate(problem: Problem, left: dict[int, float], right: dict[int, float]) -> float | None:
    """Return what one second of work of either stage adds to their slowest lane; None if it is not a constant."""
    if left != right or (len(left) > 1 and problem.transfers == "waited"):
        return None
    return max(float(share / problem.speeds[lane]) for lane, share in left.items())


def _half(problem: Problem, cut: int) -> Floats:
    if problem.transfers == "hidden" or not 0 <= cut < problem.num_stages - 1:
        return np.zeros(len(problem.positions))
    return np.asarray(problem.trips[cut] / 2)


def _wires(problem: Problem, left: int, right: int) -> dict[object, tuple[Floats, Floats]]:
    """Return the load of each wire from the cut after the left stage and the cut before the right stage."""
    found: dict[object, tuple[Floats, Floats]] = {}
    none = np.zeros(len(problem.positions))
    inner = [(left, 0)] if left == right - 1 else [(left, 0), (right - 1, 1)]
    for cut, side in inner if left < right else []:
        for wire, (there, back) in problem.wires[cut].items():
            costs = list(found.get(wire, (none, none)))
            costs[side] = costs[side] + there * problem.width + back * problem.grad_width
            found[wire] = (costs[0], costs[1])
    return found


def _room(pair: _Pair, reached: Grid) -> Floats:
    """[a, b] how much time the outer ends of a pair leave for its inner ends."""
    return np.where(reached, -(pair.left_enter[:, None] + pair.right_leave[None]), -np.inf)


def _reach(pairs: list[_Pair], problem: Problem, limit: float) -> list[Grid] | None:
    """Return for each pair its possible outer ends within a period; None if no cuts are within the period."""
    size = len(problem.positions)
    reached = [np.zeros((size, size), dtype=np.bool_)]
    reached[0][0, size - 1] = True
    for number, pair in enumerate(pairs):
        room = _room(pair, reached[-1])
        if number == len(pairs) - 1 and problem.num_stages % 2:  # a stage alone, from a to b
            reached.append(np.triu(room >= -limit, k=1))
            continue
        best = np.full((size, size), -np.inf)
        inner = np.maximum.accumulate(np.maximum.accumulate(room, axis=0)[:, ::-1], axis=1)[:, ::-1]
        best[1:, :-1] = inner[:-1, 1:]
        fine = best - pair.left_leave[:, None] - pair.right_enter[None] >= -limit
        if pair.floor is not None:
            fine &= pair.floor <= limit
        is_middle = number == len(pairs) - 1
        reached.append(np.triu(fine) & np.eye(size, dtype=np.bool_) if is_middle else np.triu(fine, k=1))
    return reached if reached[-1].any() else None


def _trace(pairs: list[_Pair], problem: Problem, reached: list[Grid], limit: float) -> list[int]:
    """Return cuts within a period, found from the inside out."""
    i, j = (int(at) for at in np.argwhere(reached[-1])[0])
    is_odd = problem.num_stages % 2 == 1
    left, right = [i], [j] if is_odd else []
    for number in range(len(pairs) - 1 - is_odd, 0, -1):
        pair = pairs[number]
        room = _room(pair, reached[number])[:i, j + 1 :]
        need = pair.left_leave[i] + pair.right_enter[j] - limit
        a, b = np.argwhere(room >= min(need, float(room.max())))[0].tolist()
        i, j = a, b + j + 1
        left, right = [i, *left], [*right, j]
    return [*left, *right]
