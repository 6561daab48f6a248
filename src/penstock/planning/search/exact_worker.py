"""Exact worker: the child process of `exact`. It reads a shop of integers as JSON and writes the answer of CP-SAT.

It imports nothing of Penstock; the parent knows the meaning of actions and does all rounding. OR-Tools is imported only
here: it cannot share a process with highspy, and its side effects must not reach the process of the user.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExpr

Status = Literal["optimal", "feasible", "unknown", "infeasible", "invalid", "missing"]


class MemoryBudget(TypedDict):
    """The holdings of one lane, and its capacity in units.

    A holding is (from event, to event, units). Event `2 * node` is the start of a node, `2 * node + 1` its end.
    """

    holdings: list[tuple[int, int, int]]
    capacity: int


class Shop(TypedDict):
    """A schedule to find, in integer units of time; nodes are numbered from 0."""

    durations: list[int]
    lanes: list[list[int]]  # the nodes of each lane, in any order
    waits: list[tuple[int, int, int]]  # (maker, user, lag): the user starts at least lag after the end of the maker
    prompt: list[tuple[int, int, int]]  # the same, but exactly lag after
    rooms: list[MemoryBudget]
    earliest: list[int]  # start of each node
    latest: list[int]
    spans: list[tuple[int, int]]  # (first, last): minimise the longest; first is -1 if time counts from 0
    lower: int  # bound of the longest span
    upper: int
    hint: list[int]  # a start for each node, or empty
    seconds: float
    workers: int


class Answer(TypedDict):
    """The answer of the solver; `starts` is empty if it has no schedule."""

    status: Status
    starts: list[int]
    bound: float
    seconds: float
    message: str


def solve(shop: Shop) -> Answer:
    """Build the model, solve it and return the answer."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    starts = _build(model, shop)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = shop["seconds"]
    solver.parameters.num_workers = shop["workers"]
    result = solver.solve(model)
    statuses: dict[object, Status] = {
        cp_model.OPTIMAL: "optimal",
        cp_model.FEASIBLE: "feasible",
        cp_model.UNKNOWN: "unknown",
        cp_model.INFEASIBLE: "infeasible",
        cp_model.MODEL_INVALID: "invalid",
    }
    status = statuses[result]
    return {
        "status": status,
        "starts": [solver.value(start) for start in starts] if status in ("optimal", "feasible") else [],
        "bound": solver.best_objective_bound,
        "seconds": solver.wall_time,
        "message": model.validate() if status == "invalid" else "",
    }


def _build(model: CpModel, shop: Shop) -> list[IntVar]:
    """Add all variables and constraints; return the start of each node."""
    durations = shop["durations"]
    window = zip(shop["earliest"], shop["latest"], strict=True)
    starts = [model.new_int_var(first, last, f"start{node}") for node, (first, last) in enumerate(window)]
    ends = [start + duration for start, duration in zip(starts, durations, strict=True)]
    for lane in shop["lanes"]:
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[n], durations[n], f"run{n}") for n in lane])
    for maker, user, lag in shop["waits"]:
        model.add(starts[user] >= ends[maker] + lag)
    for maker, user, lag in shop["prompt"]:
        model.add(starts[user] == ends[maker] + lag)
    events = [moment for pair in zip(starts, ends, strict=True) for moment in pair]
    horizon = max(last + duration for last, duration in zip(shop["latest"], durations, strict=True))
    for room in shop["rooms"]:
        _hold(model, room, events, horizon)
    longest = model.new_int_var(shop["lower"], shop["upper"], "longest")
    for first, last in shop["spans"]:
        model.add(longest >= (ends[last] if first < 0 else ends[last] - starts[first]))
    if shop["hint"]:
        for start, value in zip(starts, shop["hint"], strict=True):
            model.add_hint(start, value)
    model.minimize(longest)
    return starts


def _hold(model: CpModel, room: MemoryBudget, events: Sequence[LinearExpr], horizon: int) -> None:
    """Limit the memory of one lane: a holding is an interval of unknown length."""
    intervals, units = [], []
    for begin, end, amount in room["holdings"]:
        size = model.new_int_var(0, horizon, f"size{begin}")
        intervals.append(model.new_interval_var(events[begin], size, events[end], f"hold{begin}"))
        units.append(amount)
    model.add_cumulative(intervals, units, room["capacity"])


def main() -> None:
    """Read one shop from stdin and write the answer to stdout."""
    shop: Shop = json.load(sys.stdin)
    try:
        answer = solve(shop)
    except ImportError as error:
        answer = {"status": "missing", "starts": [], "bound": 0.0, "seconds": 0.0, "message": str(error)}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
