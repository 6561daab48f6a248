"""Violations: faults of the actions of a schedule that do not depend on their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.schedule.actions import KIND_INDEX, Action, Kind
from penstock.schedule.flow import BUILT, MISSING, NONE, Flow, Rows
from penstock.schedule.rules import GOAL, RULES, makers
from penstock.schedule.schedule import Schedule

FaultKind = Literal[
    "unknown", "misplaced", "repeated", "missing", "unmet", "deadlock", "channel", "version", "overlap", "memory"
]


@dataclass(frozen=True)
class Fault:
    """One fault: its kind, its place (lane and index; index -1: no single action), and a message."""

    kind: FaultKind
    lane: int
    index: int
    message: str

    def __str__(self) -> str:
        place = f"lane {self.lane}" + (f", action {self.index}" if self.index >= 0 else "")
        return f"{self.kind}: {place}: {self.message}"


def find_unknown(plan: Schedule, rows: Rows, *, is_lowered: bool) -> Iterator[Fault]:
    """Yield actions of stages or micro-batches that do not exist, and actions of a wrong kind."""
    outside = (rows.stage >= plan.num_stages) | (rows.mb >= plan.num_mbs)
    compute = [KIND_INDEX[kind] for kind in BUILT]
    foreign = ~np.isin(rows.kind, compute) if not is_lowered else np.zeros(len(rows), dtype=np.bool_)
    for at in np.flatnonzero(outside | foreign).tolist():
        reason = (
            f"the schedule has stages 0..{plan.num_stages - 1} and micro-batches 0..{plan.num_mbs - 1}"
            if outside[at]
            else "a schedule has only compute actions, lowering adds the rest"
        )
        yield Fault("unknown", int(rows.lane[at]), rows.index(at), f"{rows.action(at)}: {reason}")


def find_incomplete(plan: Schedule, flow: Flow) -> list[Fault]:
    """Return misplaced, repeated and missing actions, unmet needs and invalid overlaps."""
    faults = [*_find_misplaced(plan, flow.rows), *_find_repeated(plan, flow.rows)]
    return [*faults, *_find_missing(plan, flow), *_find_unmet(flow), *_find_bad_overlaps(plan)]


def _find_misplaced(plan: Schedule, rows: Rows) -> Iterator[Fault]:
    home = plan.home_table[rows.stage, plan.way_table[rows.mb]]
    for at in np.flatnonzero(home != rows.lane).tolist():
        yield Fault("misplaced", int(rows.lane[at]), rows.index(at), f"{rows.action(at)} belongs on lane {home[at]}")


def _find_repeated(plan: Schedule, rows: Rows) -> Iterator[Fault]:
    """Each value may be made only once: find repeated actions, and different actions that make the same value."""
    for kinds in sorted({makers(value) for rule in RULES.values() for value in rule.makes}):
        at = np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in kinds]))
        key = rows.stage[at].astype(np.int64) * plan.num_mbs + rows.mb[at]
        if rows.peer[at].max(initial=NONE) != NONE:  # a send makes one value per target stage
            key = key * plan.num_stages + rows.peer[at]
        is_dense = key.max(initial=0) < 8 * len(key)  # then counting is faster than sorting
        has_repeats = np.bincount(key).max(initial=0) > 1 if is_dense else len(np.unique(key)) < len(key)
        order = np.argsort(key, kind="stable") if has_repeats else np.empty(0, dtype=np.int64)
        for k in np.flatnonzero(np.diff(key[order], prepend=-1) == 0).tolist():
            yield _repeated(rows, int(at[order[k - 1]]), int(at[order[k]]))


def _repeated(rows: Rows, first: int, second: int) -> Fault:
    is_same = rows.action(first) == rows.action(second)
    both = f"{rows.action(first)} and {rows.action(second)} make the same value"
    text = f"{rows.action(second)} is repeated" if is_same else both
    place = f"the first is on lane {rows.lane[first]}, action {rows.index(first)}"
    return Fault("repeated", int(rows.lane[second]), rows.index(second), f"{text}; {place}")


def _find_missing(plan: Schedule, flow: Flow) -> Iterator[Fault]:
    made = flow.made.get(GOAL)
    undone = np.argwhere(made == MISSING) if made is not None else np.argwhere(np.ones((plan.num_stages, plan.num_mbs)))
    for stage, mb in undone.tolist():
        options = " or ".join(str(Action(kind, stage, mb)) for kind in makers(GOAL))
        what = f"the {GOAL} of stage {stage} for micro-batch {mb}"
        yield Fault("missing", plan.home(stage, mb), -1, f"nothing makes {what}: {options} is missing")


def _find_unmet(flow: Flow) -> Iterator[Fault]:
    rows = flow.rows
    for at, column in np.argwhere(flow.needs == MISSING).tolist():
        action = rows.action(at)
        value, stage = flow.needed(at, column)
        options = " or ".join(str(Action(kind, stage, action.mb)) for kind in makers(value))
        what = f"the {value} of stage {stage} for micro-batch {action.mb}"
        text = f"{action} needs {what}, but nothing makes it: {options} is missing"
        yield Fault("unmet", int(rows.lane[at]), rows.index(at), text)


def _find_bad_overlaps(plan: Schedule) -> Iterator[Fault]:
    """Yield a fault for each invalid pair; the forward must come first, since it is counted first."""
    taken: set[tuple[int, int]] = set()
    for lane, index in sorted(plan.overlaps):
        if not 0 <= lane < plan.num_lanes or not 0 <= index < len(plan.lanes[lane]) - 1:
            text = f"an overlap starts at action {index} of lane {lane}, but no action follows there"
            yield Fault("overlap", min(max(lane, 0), plan.num_lanes - 1), -1, text)
            continue
        first, second = plan.lanes[lane][index], plan.lanes[lane][index + 1]
        both = f"{first} and {second} overlap"
        if {(lane, index), (lane, index + 1)} & taken:
            yield Fault("overlap", lane, index, f"{both}, but one of them also overlaps another action")
        if first.kind is not Kind.F or second.kind not in (Kind.B, Kind.I):
            yield Fault("overlap", lane, index, f"{both}, but only a forward followed by a backward can overlap")
        taken |= {(lane, index), (lane, index + 1)}
