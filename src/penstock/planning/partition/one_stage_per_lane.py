"""One stage per lane: the exact optimum by bisection; a sweep decides whether a period is possible.

See docs/design/partition.md for the recursion and its proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.schedule.actions import Floats, Positions

SAME = 1e-9  # times with a smaller relative difference are equal
_NEAR = 1e-10  # relative precision of the bisection


@dataclass(frozen=True, eq=False)
class Chain:
    """Consecutive stages between a first and a last position, each on its own lane.

    A stage from a to b takes base + (seconds[b] - seconds[a]) / speed + enter[a] + leave[b].
    """

    seconds: Floats  # running sum of the time at speed 1, by position
    width: Floats  # bytes that cross each position; among equally good cuts, the narrower is chosen
    first: int  # start of the first stage
    last: int  # end of the last stage
    speed: Floats  # speed of the lane of each stage
    base: Floats  # other load of the lane of each stage
    enter: Floats | None = None  # [stages, positions] additional seconds of a stage that starts there
    leave: Floats | None = None  # [stages, positions] additional seconds of a stage that ends there
    # [stages, positions] seconds that a stage that starts there and the stage before wait for each other
    ride: Floats | None = None
    floor: Floats | None = None  # [stages, positions] lower bound of the period if a stage ends there
    furthest: Positions | None = None  # [stages, positions] last possible end of a stage that starts there

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.speed)

    def solve(self, *, below: float = np.inf, near: float = _NEAR) -> tuple[list[int], float] | None:
        """Return the best cuts and their period, up to a relative error; None if no cuts fit below a bound."""
        low = self._least()
        found = self._descend(low, below)
        if found is None:
            return None
        cuts, high = found
        while high - low > near * high:
            middle = (low + high) / 2
            ends = self._sweep(middle)
            if ends is None:
                low = middle
                continue
            cuts = self._walk(middle, ends)
            high = min(middle, self.period(cuts))
        period = self.period(cuts)
        limit = period * (1 + SAME)
        ends = self._sweep(limit)
        return (self._walk(limit, ends, evenly=False) if ends is not None else cuts), period

    def fits(self) -> list[int] | None:
        """Return cuts that respect `furthest`, regardless of time; None if there are none."""
        limit = self._most()
        ends = self._sweep(limit)
        return None if ends is None else self._walk(limit, ends)

    def period(self, cuts: list[int]) -> float:
        """Return the time of one micro-batch in the steady state."""
        bounds = np.array([self.first, *cuts, self.last])
        a, b, stage = bounds[:-1], bounds[1:], np.arange(self.num_stages)
        time = self.base + (self.seconds[b] - self.seconds[a]) / self.speed
        time = time + (0 if self.enter is None else self.enter[stage, a])
        time = time + (0 if self.leave is None else self.leave[stage, b])
        longest = float(time.max())
        if self.floor is not None and len(cuts):
            longest = max(longest, float(self.floor[stage[:-1], b[:-1]].max()))
        if self.ride is not None:
            longest = max(longest, longest_mean(time, self.ride[stage[1:], a[1:]]))
        return longest

    def _least(self) -> float:
        """Return a lower bound: all work shared evenly by the lanes, the largest base load, the longest single node."""
        whole = np.diff(self.seconds[self.first : self.last + 1])
        even = (whole.sum() + (self.base * self.speed).sum()) / self.speed.sum()
        return float(max(even, self.base.max(), whole.max() / self.speed.max(), 0.0))

    def _most(self) -> float:
        """Return an upper bound: no cuts take this long."""
        work = (self.seconds[self.last] - self.seconds[self.first]) / self.speed.min() + self.base.max()
        extra = sum(
            float(given.max()) for given in (self.enter, self.leave, self.ride, self.floor) if given is not None
        )
        return float(2 * (work + 2 * extra) + 1e-300)

    def _descend(self, low: float, below: float) -> tuple[list[int], float] | None:
        """Return starting cuts: the first that fit while the limit grows from the lower bound."""
        share, most = 2.0**-7, min(self._most(), below)
        while True:
            limit = min(low * (1 + share), most) if low > 0 else most
            ends = self._sweep(limit)
            if ends is not None:
                cuts = self._walk(limit, ends)
                return cuts, min(limit, self.period(cuts))
            if limit >= most:
                return None
            share *= 4

    def _windows(self, limit: float) -> tuple[Positions, Positions] | None:
        """Return the possible range of each cut, from the work before and after it."""
        room = (limit - self.base) * self.speed
        if (room < 0).any():
            return None
        before = self.seconds[self.first] + np.concatenate([[0.0], np.cumsum(room)])
        behind = self.seconds[self.last] - np.concatenate([np.cumsum(room[::-1])[::-1], [0.0]])
        slack = SAME * max(float(self.seconds[self.last]), 0.0)  # for rounding: these ranges are bounds only
        steps = np.arange(self.num_stages + 1)
        high = np.minimum(
            np.searchsorted(self.seconds, before + slack, side="right") - 1, self.last - self.num_stages + steps
        )
        low = np.maximum(np.searchsorted(self.seconds, behind - slack, side="left"), self.first + steps)
        low, high = np.maximum(low, self._reachable[0]), np.minimum(high, self._reachable[1])
        low[0] = high[0] = self.first
        low[-1] = high[-1] = self.last
        return (low, high) if (low <= high).all() else None

    @cached_property
    def _reachable(self) -> tuple[Positions, Positions]:
        """The possible range of each cut, from `furthest` alone: reachable from the start, and the end from it."""
        low = np.full(self.num_stages + 1, self.first)
        high = np.full(self.num_stages + 1, self.last)
        high[0], low[-1] = self.first, self.last
        if self.furthest is None:
            return low, high
        for stage in range(self.num_stages - 1):
            reach = self.furthest[stage, self.first : high[stage] + 1]
            high[stage + 1] = reach.max() if reach.size else self.first - 1
        for stage in range(self.num_stages - 1, 0, -1):
            reaches = np.flatnonzero(self.furthest[stage] >= low[stage + 1])
            low[stage] = max(self.first, int(reaches[0])) if reaches.size else self.last + 1
        return np.minimum(low, self.last + 1), np.minimum(high, self.last)

    def _sweep(self, limit: float) -> list[tuple[int, Floats]] | None:
        """Decide whether any cuts are within a period.

        Returns:
            For each stage, the first position where it may start; and for each position from there on, the minimum
            lateness of the chain of stages that starts there, or infinity if the stage may not start there. None if
            no cuts are within the period.
        """
        windows = self._windows(limit)
        if windows is None:
            return None
        low, high = windows
        late: list[tuple[int, Floats]] = [(self.last, np.zeros(1))] * (self.num_stages + 1)
        ends = self.seconds[self.last : self.last + 1] / self.speed[-1]
        for stage in range(self.num_stages - 1, -1, -1):
            ends = self._ends(stage, int(low[stage + 1]), late[stage + 1][1], limit)
            start = int(low[stage])
            best = self._best_end(stage, (start, int(high[stage])), int(low[stage + 1]), ends)
            here = slice(start, int(high[stage]) + 1)
            late_here = best - self.seconds[here] / self.speed[stage] + (self.base[stage] - limit)
            if self.enter is not None:
                late_here += self.enter[stage, here]
            late_here[late_here > 0] = np.inf
            if not (late_here <= 0).any():
                return None
            late[stage] = (start, late_here)
        return late

    def _ends(self, stage: int, start: int, late: Floats, limit: float) -> Floats:
        """Return the cost of ending a stage at each position of a window, including all later stages."""
        here = slice(start, start + len(late))
        cost = self.seconds[here] / self.speed[stage]
        if self.leave is not None:
            cost = cost + self.leave[stage, here]
        if stage == self.num_stages - 1:
            return np.asarray(cost)
        if self.ride is None:
            cost = np.where(late <= 0, cost, np.inf)
        else:
            cost = cost + np.maximum(late + self.ride[stage + 1, here], 0.0)
        return np.asarray(cost if self.floor is None else np.where(self.floor[stage, here] <= limit, cost, np.inf))

    def _best_end(self, stage: int, starts: tuple[int, int], first_end: int, ends: Floats) -> Floats:
        """Return for each start the minimum over the ends that it can reach."""
        begin = np.arange(starts[0], starts[1] + 1)
        low = np.maximum(begin + 1 - first_end, 0)
        if self.furthest is None:
            high = np.full(len(begin), len(ends) - 1)
        else:
            high = np.minimum(self.furthest[stage, starts[0] : starts[1] + 1] - first_end, len(ends) - 1)
        best = np.full(len(begin), np.inf)
        has_end = low <= high
        if not has_end.any():
            return best
        if (high[has_end] == len(ends) - 1).all():  # memory restricts nothing here
            best[has_end] = np.minimum.accumulate(ends[::-1])[::-1][low[has_end]]
        else:
            best[has_end] = _least_between(ends, low[has_end], high[has_end])
        return best

    def _walk(self, limit: float, late: list[tuple[int, Floats]], *, evenly: bool = True) -> list[int]:
        """Return cuts within a period: choose them in turn so that the remaining stages can still follow.

        With `evenly`, choose the cut with the most time to spare; otherwise the narrowest, and then the earliest.
        """
        cuts: list[int] = []
        at, behind = self.first, 0.0  # lateness of the stages so far
        slack = 1e-12 * limit
        for stage in range(self.num_stages - 1):
            start, after = late[stage + 1]
            end = start + len(after)
            reach = end - 1 if self.furthest is None else min(int(self.furthest[stage, at]), end - 1)
            here = slice(max(start, at + 1), max(reach, at) + 1)
            time = self.base[stage] + (self.seconds[here] - self.seconds[at]) / self.speed[stage] - limit
            time = time + (0 if self.leave is None else self.leave[stage, here])
            time = time + (0 if self.enter is None else self.enter[stage, at]) + max(behind, 0.0)
            rest = after[here.start - start : here.stop - start]
            over = np.maximum(time, np.where(np.isfinite(rest), rest, np.inf))
            if self.ride is not None:
                over = np.maximum(over, time + self.ride[stage + 1, here] + rest)
            if self.floor is not None:
                over = np.maximum(over, np.where(self.floor[stage, here] <= limit, -np.inf, np.inf))
            fine = np.flatnonzero(over <= max(slack, float(over.min())))
            pick = int(np.argmin(over)) if evenly else int(fine[np.argmin(self.width[here][fine])])
            at = here.start + pick
            cuts.append(at)
            behind = float(time[pick]) + (0.0 if self.ride is None else float(self.ride[stage + 1, at]))
        return cuts


def longest_mean(time: Floats, ride: Floats) -> float:
    """Return the maximum, over runs of neighbours, of the mean time per stage including their mutual waits."""
    stages = np.concatenate([[0.0], np.cumsum(time)])
    waits = np.concatenate([[0.0], np.cumsum(ride)])
    first, last = np.triu_indices(len(time))
    return float(((stages[last + 1] - stages[first] + waits[last] - waits[first]) / (last - first + 1)).max())


def _least_between(values: Floats, low: Positions, high: Positions) -> Floats:
    """Return the minimum between each pair of indices, both included (by a table over powers of two)."""
    level = np.frexp((high - low + 1).astype(np.float64))[1].astype(np.int64) - 1
    rows = [values]
    for k in range(int(level.max())):
        shorter = rows[-1]
        longer = shorter.copy()
        longer[: -(1 << k)] = np.minimum(shorter[: -(1 << k)], shorter[1 << k :])
        rows.append(longer)
    table = np.stack(rows)
    return np.asarray(np.minimum(table[level, low], table[level, high - (1 << level) + 1]))
