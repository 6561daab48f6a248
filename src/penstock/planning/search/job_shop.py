"""Job shop: a schedule with costs as a graph of actions, for the local search and the exact solver."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from penstock.planning.search.greedy import Draft, Objective, Problem
from penstock.schedule.actions import KIND_INDEX, KINDS, Kind, Lane
from penstock.schedule.flow import trace_flow
from penstock.schedule.peak_memory import changes
from penstock.schedule.schedule import Schedule


class JobShop:
    """A schedule as nodes with durations, waits and start times.

    `order` has the nodes of each lane in the order in which they run. `before` has the (node, lag) pairs that a node
    waits for, `after` those that wait for it. `takes` has the bytes that a node adds at its start, `leaves` the bytes
    that it has added in total at its end.
    """

    def __init__(self, problem: Problem, schedule: Schedule, objective: Objective) -> None:
        self.problem, self.schedule, self.objective = problem, schedule, objective
        flow = trace_flow(schedule)
        rows, costs = flow.rows, problem.costs
        self.codes = schedule.codes()
        self.lane = rows.lane.tolist()
        self.seconds = [
            float(costs.seconds_of(KINDS[k])[s]) for k, s in zip(rows.kind.tolist(), rows.stage.tolist(), strict=True)
        ]
        self.before: list[list[tuple[int, float]]] = [[] for _ in self.codes]
        self.after: list[list[tuple[int, float]]] = [[] for _ in self.codes]
        for at, needs in enumerate(flow.needs.tolist()):
            for maker in (n for n in needs if n >= 0):
                # an activation crosses the cut after its maker, a gradient the cut before it
                cut = rows.stage[maker] if rows.kind[maker] == KIND_INDEX[Kind.F] else rows.stage[at]
                lag = float(costs.transfer[cut]) if rows.lane[maker] != rows.lane[at] else 0.0
                self.before[at].append((maker, lag))
                self.after[maker].append((at, lag))
        bounds = rows.starts.tolist()
        self.order = [list(range(a, b)) for a, b in pairwise(bounds)]
        at_start, at_end = changes(costs.saved_bytes, costs.pending_bytes)
        self.takes = at_start[rows.kind, rows.stage].tolist()
        self.leaves = (at_start + at_end)[rows.kind, rows.stage].tolist()
        self.limit = [limit * (1 + 1e-9) for limit in problem.limit_bytes]
        self.place = [0] * len(self.codes)
        self.held = [0.0] * len(self.codes)  # before each node
        for lane in range(len(self.order)):
            self._index(lane)
        self.barred: set[tuple[int, int]] = set()  # swaps that deadlock
        self.end = [0.0] * len(self.codes)
        self.start = [0.0] * len(self.codes)
        self.tail = [0.0] * len(self.codes)  # from the start of a node to the end of all that waits for it

    def _index(self, lane: int) -> None:
        held = 0.0
        for place, node in enumerate(self.order[lane]):
            self.place[node], self.held[node] = place, held
            held += self.leaves[node]

    def run(self) -> float:
        """Compute all start times and tails; return the length (infinite if the order deadlocks)."""
        order, place, lane_of, before, after = self.order, self.place, self.lane, self.before, self.after
        start, end, seconds = self.start, self.end, self.seconds
        waiting = [len(makers) + 1 for makers in before]
        for lane in order:
            waiting[lane[0]] -= 1
        done = [lane[0] for lane in order if not waiting[lane[0]]]
        for node in done:  # the list grows during the loop: a topological order
            lane = order[lane_of[node]]
            at = place[node]
            begin = end[lane[at - 1]] if at else 0.0
            for maker, lag in before[node]:
                begin = max(begin, end[maker] + lag)
            start[node], end[node] = begin, begin + seconds[node]
            for other, _ in after[node]:
                waiting[other] -= 1
                if not waiting[other]:
                    done.append(other)
            if at + 1 < len(lane):
                other = lane[at + 1]
                waiting[other] -= 1
                if not waiting[other]:
                    done.append(other)
        if len(done) < len(self.codes):
            return math.inf
        offsets = [start[lane[0]] if self.objective == "span" else 0.0 for lane in order]
        for node in reversed(done):
            lane = order[lane_of[node]]
            at = place[node] + 1
            rest = self.tail[lane[at]] if at < len(lane) else -offsets[lane_of[node]]
            for other, lag in after[node]:
                rest = max(rest, self.tail[other] + lag)
            self.tail[node] = seconds[node] + rest
        lengths = [end[lane[-1]] - offset for lane, offset in zip(order, offsets, strict=True)]
        self.worst = max(range(len(lengths)), key=lengths.__getitem__)
        return lengths[self.worst]

    def best_swap(self, tabu: set[tuple[int, int]], best: float) -> tuple[int, int] | None:
        """Return the two neighbours on the critical path whose swap has the best estimate, or None."""
        promise, chosen = math.inf, None
        for u, v in self._critical_pairs():
            if (u, v) in self.barred or any(maker == u for maker, _ in self.before[v]) or not self._fits(u, v):
                continue
            estimate = self._estimate(u, v)
            if estimate < promise and ((u, v) not in tabu or estimate < best):
                promise, chosen = estimate, (u, v)
        return chosen

    def _critical_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield the neighbours of one lane on the longest chain, walking back from its end."""
        node = self.order[self.worst][-1]
        while True:
            at = self.place[node]
            previous = self.order[self.lane[node]][at - 1] if at else -1
            slack = 1e-9 * (abs(self.start[node]) + 1e-300)
            if at and self.end[previous] >= self.start[node] - slack:
                yield previous, node
                node = previous
                continue
            waits = [maker for maker, lag in self.before[node] if self.end[maker] + lag >= self.start[node] - slack]
            if not waits:
                return
            node = waits[0]

    def _fits(self, u: int, v: int) -> bool:
        limit, held = self.limit[self.lane[u]], self.held[u]
        return bool(held + self.takes[v] <= limit and held + self.leaves[v] + self.takes[u] <= limit)

    def _estimate(self, u: int, v: int) -> float:
        """Return the longest chain through either of two neighbours after swapping them."""
        lane, at = self.order[self.lane[u]], self.place[u]
        start_v = self.end[lane[at - 1]] if at else 0.0
        start_v = max([start_v, *(self.end[maker] + lag for maker, lag in self.before[v])])
        start_u = max([start_v + self.seconds[v], *(self.end[maker] + lag for maker, lag in self.before[u])])
        rest_u = self.tail[lane[at + 2]] if at + 2 < len(lane) else 0.0
        tail_u = self.seconds[u] + max([rest_u, *(self.tail[other] + lag for other, lag in self.after[u])])
        tail_v = self.seconds[v] + max([tail_u, *(self.tail[other] + lag for other, lag in self.after[v])])
        return max(start_v + tail_v, start_u + tail_u)

    def swap(self, u: int, v: int) -> None:
        """Swap two neighbours."""
        lane = self.order[self.lane[u]]
        at = self.place[u]
        lane[at], lane[at + 1] = v, u
        self.place[v], self.place[u] = at, at + 1
        self.held[v] = self.held[u]
        self.held[u] = self.held[v] + self.leaves[v]

    def draft(self, order: list[list[int]]) -> Draft:
        """Return an order as a draft."""
        self.order = order
        for lane in range(len(order)):
            self._index(lane)
        self.run()
        lanes = tuple(Lane(self.codes[np.array(lane, dtype=np.int64)]) for lane in order)
        ends = [self.end[lane[-1]] for lane in order]
        spans = [end - self.start[lane[0]] for end, lane in zip(ends, order, strict=True)]
        return Draft(replace(self.schedule, lanes=lanes), max(ends), max(spans))
