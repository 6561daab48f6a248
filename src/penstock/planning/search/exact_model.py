"""Exact model: translate a problem to integers for the solver, and the answer back.

The proof is valid for three reasons:

    1  Each stage takes its micro-batches in order. This loses nothing. In any schedule that can run, renumber the
       k-th forward that starts on each stage as micro-batch k, and likewise the k-th I (or B) and the k-th W. All
       start times stay valid: when a stage starts its k-th forward, the stage before has ended k forwards, which are
       now its first k. Memory depends on stages and kinds, not on micro-batches.
    2  Times are rounded down to a resolution, unless they are integer multiples of one. Shorter actions make no order
       longer, so the bound stays below the true optimum.
    3  The resulting order is timed again with the true costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np

from penstock.errors import SolverError, UsageError
from penstock.planning.search.exact_worker import Answer, MemoryBudget, Shop
from penstock.planning.search.greedy import Draft, Objective, Problem
from penstock.planning.search.job_shop import JobShop
from penstock.schedule.actions import Kind, Lane, encode
from penstock.schedule.flow import Rows
from penstock.schedule.peak_memory import MemoryLimit, find_over_limit
from penstock.schedule.schedule import Schedule

_MOST_UNITS = 10**9  # in a step, or in the memory of a lane: their product must fit in 64 bits
_COARSE_UNITS = 10**6  # in a step whose times must be rounded
_NOISE = 1e-9  # relative rounding error of sums

Wait = tuple[int, int, int]  # maker, user, lag


@dataclass(frozen=True)
class Proof:
    """The best schedule found, and a lower bound of all schedules of the problem.

    Attributes:
        draft: the schedule, with its length.
        bound_seconds: the lower bound.
        is_optimal: whether the schedule is as short as the bound, up to the rounding of times.
        solver_seconds: run time of the solver.
        resolution_seconds: the unit to which times were rounded down; 0 without rounding.
        objective: what was minimised.
    """

    draft: Draft
    bound_seconds: float
    is_optimal: bool
    solver_seconds: float
    resolution_seconds: float
    objective: Objective = "step"

    @property
    def gap(self) -> float:
        """The difference between the length of the schedule and the bound, as a share of the bound."""
        length = self.draft.length(self.objective)
        if self.bound_seconds > 0:
            return length / self.bound_seconds - 1
        return math.inf if length else 0.0


def kinds_of(problem: Problem) -> tuple[Kind, ...]:
    """Return the kinds of actions of a problem."""
    return (Kind.F, Kind.I, Kind.W) if problem.splits_backward else (Kind.F, Kind.B)


def _all_actions(problem: Problem) -> Schedule:
    """Return all actions on their lanes, sorted by stage, kind and micro-batch. This order cannot run."""
    mbs = np.arange(problem.num_mbs)
    lanes: list[list[np.ndarray]] = [[] for _ in range(problem.num_lanes)]
    for stage, lane in enumerate(problem.lane_of):
        lanes[lane] += [encode(kind, stage, mbs) for kind in kinds_of(problem)]
    codes = (Lane(np.concatenate(lane)) for lane in lanes)
    return Schedule(tuple(codes), (problem.lane_of,), problem.num_mbs, name=problem.name)


def _find_unit(values: Sequence[float], *, most: float, coarse: float) -> tuple[float, bool]:
    """Return the largest unit that divides all values, and True; if there is none, the coarse unit and False."""
    for digits in range(7):
        scaled = [value * 10**digits for value in values]
        if all(abs(value - round(value)) <= _NOISE * value for value in scaled):
            unit = math.gcd(*map(round, scaled)) / 10**digits or 1.0
            return (unit, True) if most <= unit * _MOST_UNITS else (coarse, False)
    return coarse, False


class Chains:
    """A graph of nodes and the waits between them."""

    def __init__(self, durations: Sequence[int], waits: Iterable[Wait]) -> None:
        self.durations = durations
        self.before: list[list[tuple[int, int]]] = [[] for _ in durations]  # (maker, lag) of each node
        self.after: list[list[tuple[int, int]]] = [[] for _ in durations]  # (user, lag)
        for maker, user, lag in waits:
            self.before[user].append((maker, lag))
            self.after[maker].append((user, lag))
        graph = {user: [maker for maker, _ in makers] for user, makers in enumerate(self.before)}
        self.sorted = list(TopologicalSorter(graph).static_order())  # raises CycleError

    @cached_property
    def heads(self) -> list[int]:
        """For each node, the length of the longest chain that must end before its start."""
        heads = [0] * len(self.durations)
        for node in self.sorted:
            heads[node] = max((heads[m] + self.durations[m] + lag for m, lag in self.before[node]), default=0)
        return heads

    @cached_property
    def tails(self) -> list[int]:
        """For each node, the length of the longest chain that must follow its end."""
        tails = [0] * len(self.durations)
        for node in reversed(self.sorted):
            tails[node] = max((lag + self.durations[u] + tails[u] for u, lag in self.after[node]), default=0)
        return tails

    def outermost(self, lane: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the nodes that no chain from their own lane reaches, and those whose chains never return to it."""
        earlier, later = [0] * len(lane), [0] * len(lane)  # lanes as bits
        for node in self.sorted:
            for maker, _ in self.before[node]:
                earlier[node] |= earlier[maker] | 1 << lane[maker]
        for node in reversed(self.sorted):
            for user, _ in self.after[node]:
                later[node] |= later[user] | 1 << lane[user]
        nodes = range(len(lane))
        return [n for n in nodes if not earlier[n] >> lane[n] & 1], [n for n in nodes if not later[n] >> lane[n] & 1]


class ExactModel:
    """A problem in integers. A node is an action; the micro-batches of one kind and stage are neighbours."""

    def __init__(self, problem: Problem, hint: Draft | None, objective: Objective) -> None:
        self.problem, self.hint, self.objective = problem, hint, objective
        plan = _all_actions(problem)
        self.rows, self.nodes = Rows.of(plan), JobShop(problem, plan, objective)
        needs = [(m, user, lag) for user, makers in enumerate(self.nodes.before) for m, lag in makers]
        times = [*self.nodes.seconds, *(lag for _, _, lag in needs)]
        most = sum(times)  # upper bound: all actions and lags in one chain
        coarse = (most if hint is None else hint.step_seconds) / _COARSE_UNITS
        self.unit, self.is_exact = _find_unit(times, most=most, coarse=coarse)
        self.durations = [self._units(seconds) for seconds in self.nodes.seconds]
        self.horizon = sum(map(self._units, times))
        self.needs = [(maker, user, self._units(lag)) for maker, user, lag in needs]

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit) if self.is_exact else math.floor(seconds / self.unit)

    @cached_property
    def waits(self) -> list[Wait]:
        """All waits: from the rule table, from the order of micro-batches, and from the memory limit."""
        turns = [(a, b, 0) for nodes in self._by_kind().values() for a, b in pairwise(nodes)]
        return [*self.needs, *turns, *self._memory_waits()]

    @cached_property
    def chains(self) -> Chains:
        """The waits as a graph."""
        return Chains(self.durations, self.waits)

    # memory

    def _holdings(self, stage: int) -> list[tuple[int, int, float]]:
        """Return (from event, to event, bytes) of what a stage holds for micro-batch 0, ordered by time."""
        mine = np.flatnonzero((self.rows.stage == stage) & (self.rows.mb == 0)).tolist()
        changes: list[tuple[int, float]] = []
        for node in mine:  # ordered by kind, and thus by time
            takes, leaves = self.nodes.takes[node], self.nodes.leaves[node]
            changes += [(2 * node, takes), (2 * node + 1, leaves - takes)]
        events = [event for event, change in changes if change]
        held = np.cumsum([change for _, change in changes if change]).tolist()
        return [holding for holding in zip(events[:-1], events[1:], held[:-1], strict=True) if holding[2] > 0]

    @cached_property
    def _tight(self) -> list[tuple[float, list[list[tuple[int, int, float]]]]]:
        """For each lane that cannot hold all micro-batches at once: its limit and the holdings of its stages."""
        tight = []
        for lane, limit in enumerate(self.problem.limit_bytes):
            stages = [self._holdings(stage) for stage, home in enumerate(self.problem.lane_of) if home == lane]
            most = self.problem.num_mbs * sum(max((held for *_, held in stage), default=0.0) for stage in stages)
            if most > limit * (1 + _NOISE):
                tight.append((limit * (1 + _NOISE), stages))
        return tight

    def _memory_waits(self) -> Iterator[Wait]:
        """Yield the waits that the holdings of one stage imply: with room for k, forward m starts after m - k is freed.

        Micro-batches run in order: while m - k holds something, each of the k after it holds at least as much.
        """
        for limit, stages in self._tight:
            for holdings in stages:
                least = math.inf
                for _, end, held in holdings:
                    least = min(least, held)
                    room, first, last = math.floor(limit / least), holdings[0][0] // 2, end // 2
                    if room:  # without room, the solver reports that nothing fits
                        yield from ((last + mb - room, first + mb, 0) for mb in range(room, self.problem.num_mbs))

    def _memory_budgets(self) -> Iterator[MemoryBudget]:
        """Yield the memory of each tight lane in integer units, rounded so that nothing that fits is forbidden."""
        for limit, stages in self._tight:
            holdings = [holding for stage in stages for holding in stage]
            amounts = [held for *_, held in holdings]
            if len(stages) == 1 and len(set(amounts)) == 1 and amounts[0] <= limit:
                continue  # the waits already express this limit
            unit, is_exact = _find_unit(amounts, most=limit, coarse=max(limit, *amounts) / _MOST_UNITS)
            whole = [round(held / unit) if is_exact else math.floor(held / unit) for held in amounts]
            each = [(begin, end, units) for (begin, end, _), units in zip(holdings, whole, strict=True)]
            shifts = range(0, 2 * self.problem.num_mbs, 2)
            yield {
                "holdings": [(begin + shift, end + shift, units) for begin, end, units in each for shift in shifts],
                "capacity": math.floor(limit / unit) if is_exact else math.ceil(limit / unit),
            }

    # to the solver

    def shop(self, seconds: float, workers: int) -> Shop:
        """Return the model for the worker."""
        spans, hint = self._spans(), self._hint_starts()
        upper = self._length(hint, spans) if hint else self.horizon
        return {
            "durations": self.durations,
            "lanes": self.nodes.order,
            "waits": self.waits,
            "prompt": [wait for wait in self.needs if wait[1] in self._prompt],
            "rooms": list(self._memory_budgets()),
            "earliest": self.chains.heads,
            "latest": self._latest(upper if self.objective == "step" else self.horizon),
            "spans": spans,
            "lower": self.lower,
            "upper": upper,
            "hint": hint,
            "seconds": seconds,
            "workers": workers,
        }

    @cached_property
    def lower(self) -> int:
        """A lower bound without search: the longest chain of waits, and the work of each lane with its surroundings."""
        work = [sum(self.durations[node] for node in lane) for lane in self.nodes.order]
        if self.objective == "span":
            return max(work)
        heads, tails = self.chains.heads, self.chains.tails
        chains = [sum(parts) for parts in zip(heads, self.durations, tails, strict=True)]
        around = [min(heads[n] for n in lane) + min(tails[n] for n in lane) for lane in self.nodes.order]
        return max(*chains, *(sum(parts) for parts in zip(work, around, strict=True)))

    def _spans(self) -> list[tuple[int, int]]:
        """Return the (first, last) nodes between which time is measured; first is -1 if time counts from 0."""
        lane, (firsts, lasts) = self.nodes.lane, self.chains.outermost(self.nodes.lane)
        if self.objective == "step":
            return [(-1, last) for last in lasts]
        return [(first, last) for first in firsts for last in lasts if lane[first] == lane[last]]

    @cached_property
    def _prompt(self) -> frozenset[int]:
        """The nodes that must start as soon as they can, so that the span of a lane cannot shrink by a late start."""
        if self.objective == "step":
            return frozenset()
        firsts, _ = self.chains.outermost(self.nodes.lane)
        alone = {lane: [n for n in firsts if self.nodes.lane[n] == lane] for lane in self.problem.lane_of}
        return frozenset(nodes[0] for nodes in alone.values() if len(nodes) == 1 >= len(self.nodes.before[nodes[0]]))

    def _latest(self, horizon: int) -> list[int]:
        """Return the latest start of each node."""
        heads, tails = self.chains.heads, self.chains.tails
        latest = [horizon - duration - tail for duration, tail in zip(self.durations, tails, strict=True)]
        at_once = [node for node in self._prompt if not self.nodes.before[node]]
        return [heads[node] if node in at_once else last for node, last in enumerate(latest)]

    def _hint_starts(self) -> list[int]:
        """Return the start of each node in the hint, or an empty list without a hint."""
        if self.hint is None:
            return []
        schedule, lane = self.hint.schedule, self.nodes.lane
        if not self._is_same_work(schedule):
            raise UsageError(f"the actions of the hint are not those of the problem; hint: {schedule.name}")
        if not self._fits(schedule):
            raise UsageError(f"the hint needs more memory than the problem allows; hint: {schedule.name}")
        rows = Rows.of(schedule)
        # micro-batches are renumbered: each stage takes its own in order
        turns = {key: iter(nodes) for key, nodes in self._by_kind().items()}
        order = [next(turns[key]) for key in zip(rows.kind.tolist(), rows.stage.tolist(), strict=True)]
        neighbours = [(a, b, 0) for a, b in pairwise(order) if lane[a] == lane[b]]
        try:
            return Chains(self.durations, [*self.waits, *neighbours]).heads
        except CycleError as error:
            raise UsageError(f"the hint deadlocks; verify() shows where; hint: {schedule.name}") from error

    def _by_kind(self) -> dict[tuple[int, int], list[int]]:
        """Return the nodes of each kind and stage, by micro-batch."""
        nodes: dict[tuple[int, int], list[int]] = {}
        for node, key in enumerate(zip(self.rows.kind.tolist(), self.rows.stage.tolist(), strict=True)):
            nodes.setdefault(key, []).append(node)
        return nodes

    def _is_same_work(self, schedule: Schedule) -> bool:
        lanes = [np.sort(lane.codes) for lane in schedule.lanes]
        mine = [np.sort(self.nodes.codes[nodes]) for nodes in self.nodes.order]
        return len(lanes) == len(mine) and all(map(np.array_equal, lanes, mine))

    def _fits(self, schedule: Schedule) -> bool:
        costs = self.problem.costs
        limit = MemoryLimit(costs.saved_bytes, costs.pending_bytes, np.array(self.problem.limit_bytes))
        return not any(find_over_limit(schedule, Rows.of(schedule), limit))

    def _length(self, starts: list[int], spans: list[tuple[int, int]]) -> int:
        ends = [start + duration for start, duration in zip(starts, self.durations, strict=True)]
        return max(ends[last] - (starts[first] if first >= 0 else 0) for first, last in spans)

    # and back

    def proof(self, answer: Answer) -> Proof:
        """Return the proof of an answer; raise a SolverError if there is no schedule."""
        draft = self._best(answer)
        length = draft.length(self.objective)
        # rounding can start the span of a lane earlier: by at most two roundings per action
        rounded = 0.0 if self.is_exact else 2 * len(self.durations) * self.unit
        units = max(self.lower, math.ceil(answer["bound"] - 1e-6) if math.isfinite(answer["bound"]) else 0)
        bound = units * self.unit - (rounded if self.objective == "span" else 0.0)
        return Proof(
            draft=draft,
            bound_seconds=max(0.0, min(bound, length)),
            is_optimal=length <= units * self.unit * (1 + _NOISE) + rounded,
            solver_seconds=answer["seconds"],
            resolution_seconds=0.0 if self.is_exact else self.unit,
            objective=self.objective,
        )

    def _best(self, answer: Answer) -> Draft:
        """Return the hint or the solver's schedule, whichever is shorter."""
        found = self._draft(answer["starts"]) if answer["starts"] else None
        drafts = [draft for draft in (self.hint, found) if draft is not None]
        if drafts:
            return min(drafts, key=lambda draft: draft.length(self.objective))  # if equal, the hint
        if answer["status"] == "infeasible":
            raise SolverError("no schedule fits the memory limit; raise the limit, or save less per stage")
        raise SolverError(
            f"the exact solver found no schedule in {answer['seconds']:.1f} s; "
            "use more time, fewer micro-batches, or a schedule as a hint"
        )

    def _draft(self, starts: list[int]) -> Draft | None:
        """Return the schedule with the given starts, or None if it does not fit in memory because of rounding."""
        # actions that take no time go first among those with the same start, and makers before users
        place = {node: index for index, node in enumerate(self.chains.sorted)}
        ranks = [(start, start + self.durations[node], place[node]) for node, start in enumerate(starts)]
        draft = self.nodes.draft([sorted(nodes, key=ranks.__getitem__) for nodes in self.nodes.order])
        return draft if self._fits(draft.schedule) else None
