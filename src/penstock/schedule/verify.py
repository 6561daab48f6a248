"""Verify: prove that a schedule can run, or list everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from penstock.errors import VerifyError
from penstock.schedule.actions import KIND_INDEX, Action, Kind, Lane
from penstock.schedule.flow import MISSING, NONE, Flow, Rows, trace_flow
from penstock.schedule.grid import draw_grid
from penstock.schedule.lower import Channels, Lowered, lower
from penstock.schedule.memory import MemoryLimit, find_over_limit
from penstock.schedule.ordering import find_channel_faults, find_stuck
from penstock.schedule.rules import GOAL, RULES, Where, makers
from penstock.schedule.schedule import Schedule
from penstock.schedule.versions import find_version_faults

__all__ = ["Fault", "find_faults", "verify"]

FaultKind = Literal[
    "unknown", "misplaced", "repeated", "missing", "unmet", "deadlock", "channel", "version", "overlap", "memory"
]

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: what, and where (lane and index; index -1 where no action is to blame)."""

    kind: FaultKind
    lane: int
    index: int
    message: str

    def __str__(self) -> str:
        place = f"lane {self.lane}" + (f", action {self.index}" if self.index >= 0 else "")
        return f"{self.kind}: {place}: {self.message}"


def verify(
    schedule: Schedule | Lowered,
    *,
    memory: MemoryLimit | None = None,
    channels: Channels = "tagged",
    skips: Iterable[Sequence[int]] = (),
) -> None:
    """Return if a schedule can run, else raise with all its faults and the lanes around the first.

    Args:
        schedule: a schedule, or a lowered one.
        memory: what stages hold, and how much each lane may.
        channels: how the transport matches receives to sends.
        skips: (from stage, to stage) for values that jump over stages.

    Raises:
        VerifyError: with `faults`.

    >>> verify(Schedule.of(["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"]))
    Traceback (most recent call last):
        ...
    penstock.errors.VerifyError: schedule cannot run; faults: 1
      missing: lane 0: nothing makes the weight gradient of stage 0 for micro-batch 1: 0B1 or 0W1 is missing
    lane 0 |  ·     ·     ·     ·    >0F0<  0F1   0B0
    lane 1 |  ·     ·     ·     ·     1F0   1B0   1F1   1B1
    """
    faults = find_faults(schedule, memory=memory, channels=channels, skips=skips)
    if not faults:
        return
    plan = schedule.schedule if isinstance(schedule, Lowered) else schedule
    lines = [f"{plan.name} cannot run; faults: {len(faults)}", *(f"  {fault}" for fault in faults[:_MOST_SHOWN])]
    if len(faults) > _MOST_SHOWN:
        lines.append(f"  ... and {len(faults) - _MOST_SHOWN} more")
    texts = (
        list(schedule.lane_texts())
        if isinstance(schedule, Lowered)
        else [[str(a) for a in lane] for lane in plan.lanes]
    )
    places: dict[int, int] = {}
    for fault in faults:
        if fault.index >= 0:
            places.setdefault(fault.lane, fault.index)
    first = next((f for f in faults if f.index >= 0), faults[0])
    lines.append(draw_grid(texts, at=places, marked=(first.lane, max(first.index, 0))))
    raise VerifyError("\n".join(lines), tuple(faults))


def find_faults(
    schedule: Schedule | Lowered,
    *,
    memory: MemoryLimit | None = None,
    channels: Channels = "tagged",
    skips: Iterable[Sequence[int]] = (),
) -> list[Fault]:
    """Return everything that is wrong with a schedule, sorted by lane and place."""
    plan = schedule.schedule if isinstance(schedule, Lowered) else schedule
    pairs = schedule.skips if isinstance(schedule, Lowered) else tuple((int(a), int(b)) for a, b in skips)
    rows = schedule.rows if isinstance(schedule, Lowered) else Rows.of(plan)
    faults = list(_find_unknown(plan, rows, is_lowered=isinstance(schedule, Lowered)))
    if faults:  # nothing else can be looked up for such actions: go on without them
        bad = {(fault.lane, fault.index) for fault in faults}
        if isinstance(schedule, Lowered):
            return faults
        plan = _without(plan, bad)
        rows = Rows.of(plan)
    flow = trace_flow(plan, rows, skips=pairs)
    faults += _find_misplaced(plan, rows)
    faults += _find_repeated(plan, rows)
    faults += _find_missing(plan, flow)
    faults += _find_unmet(flow)
    faults += (Fault("overlap", *fault) for fault in _find_bad_overlaps(plan))
    if plan.versions is not None or Kind.U in rows.present:
        faults += (Fault("version", *fault) for fault in find_version_faults(plan))
    can_lower = not faults
    faults += (Fault("deadlock", *fault) for fault in find_stuck(plan, flow, blocking=False))
    if isinstance(schedule, Lowered) and channels != "tagged":
        faults += (Fault("channel", *fault) for fault in find_channel_faults(flow))
    if can_lower and channels == "blocking" and not any(fault.kind == "deadlock" for fault in faults):
        lowered = schedule if isinstance(schedule, Lowered) else lower(plan, skips=pairs, channels=channels)
        faults += (
            _as_built(Fault("deadlock", *fault), lowered, schedule)
            for fault in find_stuck(plan, lowered.flow, blocking=True)
        )
    if memory is not None:
        faults += (Fault("memory", *fault) for fault in find_over_limit(plan, rows, memory))
    return sorted(set(faults), key=lambda fault: (fault.lane, fault.index, fault.kind, fault.message))


def _as_built(fault: Fault, lowered: Lowered, given: Schedule | Lowered) -> Fault:
    """Point from a place in the lowered lane to the action of the schedule as built that is nearest before it."""
    if isinstance(given, Lowered):
        return fault
    rows, begin = lowered.rows, int(lowered.rows.starts[fault.lane])
    kinds = rows.kind[begin : begin + fault.index]
    built = np.isin(kinds, [KIND_INDEX[k] for k in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)]).sum()
    return replace(fault, index=min(int(built), len(given.lanes[fault.lane]) - 1))


def _find_unknown(plan: Schedule, rows: Rows, *, is_lowered: bool) -> Iterator[Fault]:
    outside = (rows.stage >= plan.num_stages) | (rows.mb >= plan.num_mbs)
    compute = [KIND_INDEX[kind] for kind in Kind if RULES[kind].where is Where.LANE and kind is not Kind.RECOMPUTE]
    foreign = ~np.isin(rows.kind, compute) if not is_lowered else np.zeros(len(rows), dtype=np.bool_)
    for at in np.flatnonzero(outside | foreign).tolist():
        reason = (
            f"the schedule has stages 0..{plan.num_stages - 1} and micro-batches 0..{plan.num_mbs - 1}"
            if outside[at]
            else "a schedule holds compute only, lowering adds the rest"
        )
        yield Fault("unknown", int(rows.lane[at]), rows.index(at), f"{rows.action(at)}: {reason}")


def _without(plan: Schedule, places: set[tuple[int, int]]) -> Schedule:
    """Return the schedule without some of its actions."""
    lanes, versions = [], []
    for number, lane in enumerate(plan.lanes):
        keep = np.array([(number, index) not in places for index in range(len(lane))], dtype=np.bool_)
        lanes.append(Lane(lane.codes[keep]))
        if plan.versions is not None:
            versions.append(plan.versions[number][keep])
    return replace(plan, lanes=tuple(lanes), versions=tuple(versions) if versions else None, overlaps=frozenset())


def _find_misplaced(plan: Schedule, rows: Rows) -> Iterator[Fault]:
    home = plan.home_table[rows.stage, plan.way_table[rows.mb]]
    for at in np.flatnonzero(home != rows.lane).tolist():
        yield Fault("misplaced", int(rows.lane[at]), rows.index(at), f"{rows.action(at)} belongs on lane {home[at]}")


def _find_repeated(plan: Schedule, rows: Rows) -> Iterator[Fault]:
    """A value may be made once; so neither an action twice, nor two actions that make the same."""
    for kinds in sorted({makers(value) for rule in RULES.values() for value in rule.makes}):
        at = np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in kinds]))
        key = rows.stage[at].astype(np.int64) * plan.num_mbs + rows.mb[at]
        if rows.peer[at].max(initial=NONE) != NONE:  # a send makes one value for each stage it sends to
            key = key * plan.num_stages + rows.peer[at]
        order = np.argsort(key, kind="stable") if len(np.unique(key)) < len(key) else np.empty(0, dtype=np.int64)
        for k in np.flatnonzero(np.diff(key[order], prepend=-1) == 0).tolist():
            yield _repeated(rows, int(at[order[k - 1]]), int(at[order[k]]))


def _repeated(rows: Rows, first: int, second: int) -> Fault:
    is_same = rows.action(first) == rows.action(second)
    text = (
        f"{rows.action(second)} stands again"
        if is_same
        else f"{rows.action(first)} and {rows.action(second)} both stand"
    )
    place = f"the first on lane {rows.lane[first]}, action {rows.index(first)}"
    return Fault("repeated", int(rows.lane[second]), rows.index(second), f"{text}; {place}")


def _find_missing(plan: Schedule, flow: Flow) -> Iterator[Fault]:
    made = flow.made.get(GOAL)
    undone = np.argwhere(made == MISSING) if made is not None else np.argwhere(np.ones((plan.num_stages, plan.num_mbs)))
    for stage, mb in undone.tolist():
        options = " or ".join(str(Action(kind, stage, mb)) for kind in makers(GOAL))
        yield Fault(
            "missing",
            plan.home(stage, mb),
            -1,
            f"nothing makes the {GOAL} of stage {stage} for micro-batch {mb}: {options} is missing",
        )


def _find_unmet(flow: Flow) -> Iterator[Fault]:
    rows = flow.rows
    for at, column in np.argwhere(flow.needs == MISSING).tolist():
        action = rows.action(at)
        value, stage = flow.needed(at, column)
        options = " or ".join(str(Action(kind, stage, action.mb)) for kind in makers(value))
        what = f"the {value} of stage {stage} for micro-batch {action.mb}"
        text = f"{action} needs {what}, but nothing makes it: {options} is missing"
        yield Fault("unmet", int(rows.lane[at]), rows.index(at), text)


def _find_bad_overlaps(plan: Schedule) -> Iterator[tuple[int, int, str]]:
    taken: set[tuple[int, int]] = set()
    for lane, index in sorted(plan.overlaps):
        if not 0 <= lane < plan.num_lanes or not 0 <= index < len(plan.lanes[lane]) - 1:
            yield (
                min(max(lane, 0), plan.num_lanes - 1),
                -1,
                f"an overlap starts at action {index} of lane {lane}, which has no neighbour behind it",
            )
            continue
        pair = plan.lanes[lane][index], plan.lanes[lane][index + 1]
        if {(lane, index), (lane, index + 1)} & taken:
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but one of them overlaps another action too"
        if sum(action.kind is Kind.F for action in pair) != 1 or not {a.kind for a in pair} <= {Kind.F, Kind.B, Kind.I}:
            yield lane, index, f"{pair[0]} and {pair[1]} overlap, but only a forward and a backward can"
        taken |= {(lane, index), (lane, index + 1)}
