"""Exact: find the shortest schedule of a small problem and prove that none is shorter, with OR-Tools' CP-SAT.

The problem becomes a shop of whole numbers, in three steps that keep the proof true:

    1  Every stage takes its micro-batches in order. Nothing is lost: take any schedule that can run, and let
       the k-th forward to start on each stage be micro-batch k's, likewise the k-th I (or B) and the k-th W.
       Every start stays where it is and finds what it waits for: when a stage starts its k-th forward, the
       stage before has ended k of them, so its first k. Memory counts stages and kinds, not micro-batches.
    2  Times are rounded down to a resolution, unless they are whole multiples of one. An order with less to
       do is no longer than before, so the bound stays below the true optimum.
    3  The order that comes back is timed again with the true costs.

The solver runs in a child process: see `exact_worker`.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np

from penstock.errors import SolverError, UsageError
from penstock.planning import exact_worker
from penstock.planning.exact_worker import Answer, Room, Shop
from penstock.planning.greedy import Draft, Objective, Problem
from penstock.planning.polish import _Shop as Nodes  # who waits for whom, and how long: the same for both
from penstock.schedule.actions import Kind, Lane, encode
from penstock.schedule.flow import Rows
from penstock.schedule.memory import MemoryLimit, find_over_limit
from penstock.schedule.schedule import Schedule

__all__ = ["MAX_ACTIONS", "Proof", "solve_exactly"]

MAX_ACTIONS = 2000  # a proof for half as many takes luck; this many is where a model stops being cheap to refuse
_GRACE_SECONDS = 20.0  # for the child to start, build its model and stop
_MOST_UNITS = 10**9  # in a step, or in a lane's memory: their product must stay within 64 bits
_COARSE_UNITS = 10**6  # in a step, where its times must be rounded
_NOISE = 1e-9  # relative; by so much sums of floats differ

Wait = tuple[int, int, int]  # maker, user, lag


@dataclass(frozen=True)
class Proof:
    """The best schedule found, and a bound: no schedule of the problem is shorter.

    Attributes:
        draft: the schedule, with its length.
        bound_seconds: what was proven.
        is_optimal: is the schedule as short as the bound, up to the rounding of times?
        solver_seconds: how long the solver ran.
        resolution_seconds: what times were rounded down to; 0 where they were not.
        objective: what was shortened.
    """

    draft: Draft
    bound_seconds: float
    is_optimal: bool
    solver_seconds: float
    resolution_seconds: float
    objective: Objective = "step"

    @property
    def gap(self) -> float:
        """How much longer the schedule is than the bound, as a share of the bound."""
        length = self.draft.length(self.objective)
        if self.bound_seconds > 0:
            return length / self.bound_seconds - 1
        return math.inf if length else 0.0


def solve_exactly(
    problem: Problem,
    *,
    hint: Draft | None,
    objective: Objective = "step",
    time_limit_seconds: float = 60.0,
    workers: int = 2,
) -> Proof:
    """Return the shortest schedule found in a time limit, never longer than the hint, and a proven bound.

    Args:
        problem: what to schedule; without a fixed order.
        hint: where to start; a good one shortens the search.
        objective: what to shorten.
        time_limit_seconds: for the solver itself; starting it takes a second more.
        workers: threads of the solver.

    Raises:
        SolverError: when the solver is missing, fails or finds nothing, or the problem is too big for it.
        UsageError: when an argument cannot be right.
    """
    _check(problem, time_limit_seconds, workers)
    model = _Model(problem, hint, objective)
    answer = _ask(model.shop(time_limit_seconds, workers), time_limit_seconds)
    return model.proof(answer)


def _check(problem: Problem, time_limit_seconds: float, workers: int) -> None:
    faults = []
    if not 0 < time_limit_seconds < math.inf:
        faults.append(f"time_limit_seconds: {time_limit_seconds} must be finite and more than 0")
    if workers < 1:
        faults.append(f"workers: {workers} must be 1 or more")
    if problem.order is not None:
        faults.append("the problem fixes an order, which the exact solver is there to choose: leave it out")
    if idle := sorted(set(range(problem.num_lanes)) - set(problem.lane_of)):
        faults.append(f"lanes without a stage: {idle}")
    if faults:
        raise UsageError("; ".join(faults))
    num_actions = len(_kinds(problem)) * len(problem.lane_of) * problem.num_mbs
    if num_actions > MAX_ACTIONS:
        raise SolverError(
            f"the problem is too big for the exact solver; actions: {num_actions}, at most: {MAX_ACTIONS}; "
            "take fewer micro-batches or stages, or do without a proof"
        )


def _kinds(problem: Problem) -> tuple[Kind, ...]:
    return (Kind.F, Kind.I, Kind.W) if problem.splits_backward else (Kind.F, Kind.B)


def _all_actions(problem: Problem) -> Schedule:
    """Return every action on its lane: by stage, then kind, then micro-batch. It cannot run in this order."""
    mbs = np.arange(problem.num_mbs)
    lanes: list[list[np.ndarray]] = [[] for _ in range(problem.num_lanes)]
    for stage, lane in enumerate(problem.lane_of):
        lanes[lane] += [encode(kind, stage, mbs) for kind in _kinds(problem)]
    codes = (Lane(np.concatenate(lane)) for lane in lanes)
    return Schedule(tuple(codes), (problem.lane_of,), problem.num_mbs, name=problem.name)


def _find_unit(values: Sequence[float], *, most: float, coarse: float) -> tuple[float, bool]:
    """Return the largest unit that divides all values, and True; or the coarse one, and False, if there is none."""
    for digits in range(7):
        scaled = [value * 10**digits for value in values]
        if all(abs(value - round(value)) <= _NOISE * value for value in scaled):
            unit = math.gcd(*map(round, scaled)) / 10**digits or 1.0
            return (unit, True) if most <= unit * _MOST_UNITS else (coarse, False)
    return coarse, False


def _earliest(durations: Sequence[int], waits: Sequence[Wait]) -> list[int]:
    """Return the earliest start of every node, by its longest chain of waits."""
    before: list[list[tuple[int, int]]] = [[] for _ in durations]
    for maker, user, lag in waits:
        before[user].append((maker, lag))
    start = [0] * len(durations)
    for node in TopologicalSorter({u: [m for m, _ in makers] for u, makers in enumerate(before)}).static_order():
        start[node] = max((start[m] + durations[m] + lag for m, lag in before[node]), default=0)
    return start


class _Model:
    """A problem as whole numbers, and the way back. A node is an action; micro-batches of a kind are neighbours."""

    def __init__(self, problem: Problem, hint: Draft | None, objective: Objective) -> None:
        self.problem, self.hint, self.objective = problem, hint, objective
        plan = _all_actions(problem)
        self.rows, self.nodes = Rows.of(plan), Nodes(problem, plan, objective)
        needs = [(m, user, lag) for user, makers in enumerate(self.nodes.before) for m, lag in makers]
        times = [*self.nodes.seconds, *(lag for _, _, lag in needs)]
        most = sum(times)  # of any order: all its actions and lags in one chain
        coarse = (most if hint is None else hint.step_seconds) / _COARSE_UNITS
        self.unit, self.is_exact = _find_unit(times, most=most, coarse=coarse)
        self.durations = [self._units(seconds) for seconds in self.nodes.seconds]
        self.horizon = sum(map(self._units, times))
        self.needs = [(maker, user, self._units(lag)) for maker, user, lag in needs]

    def _units(self, seconds: float) -> int:
        return round(seconds / self.unit) if self.is_exact else math.floor(seconds / self.unit)

    @cached_property
    def waits(self) -> list[Wait]:
        """What waits for what: by the rule table, by the order of micro-batches, and by what memory implies."""
        stages, kinds = self.rows.stage, self.rows.kind
        same = np.flatnonzero((np.diff(stages) == 0) & (np.diff(kinds) == 0)).tolist()
        return [*self.needs, *((node, node + 1, 0) for node in same), *self._memory_waits()]

    # memory

    def _holdings(self, stage: int) -> list[tuple[int, int, float]]:
        """Return (from event, to event, bytes) for what a stage holds of micro-batch 0, in the order of time."""
        mine = np.flatnonzero((self.rows.stage == stage) & (self.rows.mb == 0)).tolist()
        changes: list[tuple[int, float]] = []
        for node in mine:  # by kind, which is how they wait for each other
            takes, leaves = self.nodes.takes[node], self.nodes.leaves[node]
            changes += [(2 * node, takes), (2 * node + 1, leaves - takes)]
        events = [event for event, change in changes if change]
        held = np.cumsum([change for _, change in changes if change]).tolist()
        return [holding for holding in zip(events[:-1], events[1:], held[:-1], strict=True) if holding[2] > 0]

    @cached_property
    def _tight(self) -> list[tuple[float, list[list[tuple[int, int, float]]]]]:
        """For each lane that cannot hold all micro-batches at once: its limit, and each stage's holdings."""
        tight = []
        for lane, limit in enumerate(self.problem.limit_bytes):
            stages = [self._holdings(stage) for stage, home in enumerate(self.problem.lane_of) if home == lane]
            most = self.problem.num_mbs * sum(max((held for *_, held in stage), default=0.0) for stage in stages)
            if most > limit * (1 + _NOISE):
                tight.append((limit * (1 + _NOISE), stages))
        return tight

    def _memory_waits(self) -> Iterator[Wait]:
        """Yield what a stage's own holdings imply: with room for k, forward m starts after m - k has let go.

        Micro-batches go in order: as long as m - k holds something, the k after it hold as much at least.
        """
        for limit, stages in self._tight:
            for holdings in stages:
                least = math.inf
                for _, end, held in holdings:
                    least = min(least, held)
                    room, first, last = math.floor(limit / least), holdings[0][0] // 2, end // 2
                    if room:  # without any, the solver will say that nothing fits
                        yield from ((last + mb - room, first + mb, 0) for mb in range(room, self.problem.num_mbs))

    def _rooms(self) -> Iterator[Room]:
        """Yield each tight lane's memory in whole units, rounded so that nothing that fits is forbidden."""
        for limit, stages in self._tight:
            holdings = [holding for stage in stages for holding in stage]
            amounts = [held for *_, held in holdings]
            if len(stages) == 1 and len(set(amounts)) == 1 and amounts[0] <= limit:
                continue  # the waits say it all
            unit, is_exact = _find_unit(amounts, most=limit, coarse=limit / _MOST_UNITS)
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
        durations = self.durations
        heads, rest = _earliest(durations, self.waits), self._rest()
        spans, hint = self._spans(), self._hint_starts()
        upper = self._length(hint, spans) if hint else self.horizon
        horizon = upper if self.objective == "step" else self.horizon
        return {
            "durations": durations,
            "lanes": self.nodes.order,
            "waits": self.waits,
            "prompt": self._prompt(),
            "rooms": list(self._rooms()),
            "earliest": heads,
            "latest": [horizon - duration - after for duration, after in zip(durations, rest, strict=True)],
            "spans": spans,
            "lower": self.lower,
            "upper": upper,
            "hint": hint,
            "seconds": seconds,
            "workers": workers,
        }

    def _rest(self) -> list[int]:
        """Return for every node the longest chain of what must follow its end."""
        return _earliest(self.durations, [(user, maker, lag) for maker, user, lag in self.waits])

    @cached_property
    def lower(self) -> int:
        """A bound without search: every chain of waits; every lane's work, after and before what others need."""
        work = [sum(self.durations[node] for node in lane) for lane in self.nodes.order]
        if self.objective == "span":
            return max(work)
        heads, rest = _earliest(self.durations, self.waits), self._rest()
        chains = [sum(parts) for parts in zip(heads, self.durations, rest, strict=True)]
        around = [min(heads[n] for n in lane) + min(rest[n] for n in lane) for lane in self.nodes.order]
        return max(*chains, *(sum(parts) for parts in zip(work, around, strict=True)))

    def _outermost(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return for each lane the nodes that may be its first, and its last."""
        lane = self.nodes.lane
        inside = [(maker, user) for maker, user, _ in self.waits if lane[maker] == lane[user]]
        makers, users = {maker for maker, _ in inside}, {user for _, user in inside}
        firsts = [[node for node in nodes if node not in users] for nodes in self.nodes.order]
        lasts = [[node for node in nodes if node not in makers] for nodes in self.nodes.order]
        return firsts, lasts

    def _spans(self) -> list[tuple[int, int]]:
        firsts, lasts = self._outermost()
        if self.objective == "step":
            return [(-1, last) for nodes in lasts for last in nodes]
        return [(a, b) for first, last in zip(firsts, lasts, strict=True) for a in first for b in last]

    def _prompt(self) -> list[Wait]:
        """Return the waits of lanes' first nodes: a lane's span begins when it can, not when it would look best."""
        if self.objective == "step":
            return []
        firsts, _ = self._outermost()
        alone = {nodes[0] for nodes in firsts if len(nodes) == 1}
        prompt = [wait for wait in self.needs if wait[1] in alone]
        return [wait for wait in prompt if sum(wait[1] == other[1] for other in prompt) == 1]

    def _hint_starts(self) -> list[int]:
        """Return when the hint starts each node."""
        if self.hint is None:
            return []
        rows = Rows.of(self.hint.schedule)
        wrong = (
            f"the hint is no schedule of this problem; hint: {self.hint.schedule.name}, problem: {self.problem.name}"
        )
        if not self._is_same_work(self.hint.schedule) or not self._fits(self.hint.schedule):
            raise UsageError(wrong)
        # the micro-batches of each stage renumbered in the order they come
        firsts = np.flatnonzero(self.rows.mb == 0).tolist()
        turn = {
            (int(self.rows.kind[n]), int(self.rows.stage[n])): iter(range(n, n + self.problem.num_mbs)) for n in firsts
        }
        order = [next(turn[key]) for key in zip(rows.kind.tolist(), rows.stage.tolist(), strict=True)]
        neighbours = [
            (a, b, 0) for a, b in zip(order[:-1], order[1:], strict=True) if self.nodes.lane[a] == self.nodes.lane[b]
        ]
        try:
            return _earliest(self.durations, [*self.waits, *neighbours])
        except CycleError as error:
            raise UsageError(f"{wrong}: it deadlocks") from error

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
        """Return what the solver's answer proves.

        Raises:
            SolverError: when there is no schedule.
        """
        draft = self._best(answer)
        length = draft.length(self.objective)
        # a lane's span may begin earlier by what its chain of waits was rounded; two roundings an action
        rounded = 0.0 if self.is_exact else 2 * len(self.durations) * self.unit
        units = max(self.lower, math.ceil(answer["bound"] - 1e-6) if math.isfinite(answer["bound"]) else 0)
        bound = units * self.unit - (rounded if self.objective == "span" else 0.0)
        return Proof(
            draft=draft,
            bound_seconds=max(0.0, min(bound, length)),
            is_optimal=length <= bound * (1 + _NOISE) + rounded,
            solver_seconds=answer["seconds"],
            resolution_seconds=0.0 if self.is_exact else self.unit,
            objective=self.objective,
        )

    def _best(self, answer: Answer) -> Draft:
        """Return the hint or the solver's schedule, whichever is shorter."""
        found = self._draft(answer["starts"]) if answer["starts"] else None
        drafts = [draft for draft in (self.hint, found) if draft is not None]
        if drafts:
            return min(drafts, key=lambda draft: draft.length(self.objective))  # the hint, where both are as long
        if answer["status"] == "infeasible":
            raise SolverError("no schedule keeps within the memory limit; give the lanes more, or save less a stage")
        raise SolverError(
            f"the exact solver found no schedule in {answer['seconds']:.1f} s; "
            "what helps: more time, fewer micro-batches, or a schedule as a hint"
        )

    def _draft(self, starts: list[int]) -> Draft | None:
        """Return the schedule behind some starts, or None where rounded bytes let in one that does not fit."""
        # what takes no time goes before what starts with it; among such, makers before users
        chain = {node: place for place, node in enumerate(self._by_need())}
        ranks = [(start, start + self.durations[node], chain[node]) for node, start in enumerate(starts)]
        draft = self.nodes.draft([sorted(nodes, key=ranks.__getitem__) for nodes in self.nodes.order])
        return draft if self._fits(draft.schedule) else None

    def _by_need(self) -> list[int]:
        graph: TopologicalSorter[int] = TopologicalSorter()
        for maker, user, _ in self.waits:
            graph.add(user, maker)
        return list(graph.static_order())


def _ask(shop: Shop, time_limit_seconds: float) -> Answer:
    """Let a child process solve a shop; it is killed when it stays too long, or when the user interrupts.

    Raises:
        SolverError: when the child has no answer.
    """
    # by its file, not as a module of the package: the child needs nothing of Penstock, nor what that imports
    command = [sys.executable, "-P", exact_worker.__file__]
    limit = time_limit_seconds + _GRACE_SECONDS
    try:
        child = subprocess.run(
            command, input=json.dumps(shop), capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SolverError(f"the exact solver did not stop in {limit:.0f} s; take fewer micro-batches") from error
    except OSError as error:
        raise SolverError(f"the exact solver's process did not start: {error}") from error
    if child.returncode or not child.stdout:
        last = (child.stderr.strip().splitlines() or ["nothing"])[-1]
        raise SolverError(
            f"the exact solver's process ended without an answer; exit code: {child.returncode}, it said: {last}; "
            "what helps: fewer micro-batches or workers, for it may have run out of memory"
        )
    answer: Answer = json.loads(child.stdout)
    if answer["status"] == "missing":
        raise SolverError(f"the exact solver needs OR-Tools: pip install 'penstock[exact]' ({answer['message']})")
    if answer["status"] == "invalid":
        raise SolverError(f"the exact solver refuses the model: {answer['message']}")
    return answer
