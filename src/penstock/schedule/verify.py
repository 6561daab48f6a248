"""Verify: prove that a schedule can run, or raise an error that lists its faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError, VerifyError
from penstock.schedule.actions import KIND_INDEX, Ints, Kind
from penstock.schedule.advance_lanes import Queues, advance
from penstock.schedule.flow import BUILT, NONE, Flow, Rows, check_skips, pair_rows, trace_flow, wait_together
from penstock.schedule.lower import Channels, Lowered, check_channels, lower
from penstock.schedule.peak_memory import MemoryLimit, find_over_limit
from penstock.schedule.rules import Where, occupying
from penstock.schedule.schedule import Schedule
from penstock.schedule.violations import Fault, find_incomplete, find_unknown

__all__ = ["Fault", "find_faults", "verify"]

_MOST_SHOWN = 20
_AROUND = 4  # actions that an error shows on each side of a fault
_MOST_LANES = 9  # that an error shows


def verify(
    schedule: Schedule | Lowered,
    *,
    memory: MemoryLimit | None = None,
    channels: Channels | None = None,
    skips: Iterable[Sequence[int]] = (),
) -> None:
    """Return if a schedule can run; otherwise raise an error with all faults and the lanes around the first one.

    The arguments are those of `penstock.schedules.verify`, with the memory limit as data.

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
    texts = schedule.lane_texts() if isinstance(schedule, Lowered) else ([str(a) for a in lane] for lane in plan.lanes)
    places: dict[int, int] = {}
    for fault in faults:
        if fault.index >= 0:
            places.setdefault(fault.lane, fault.index)
    first = next((f for f in faults if f.index >= 0), faults[0])
    lines.append(_draw_grid(list(texts), at=places, marked=(first.lane, max(first.index, 0))))
    raise VerifyError("\n".join(lines), tuple(faults))


def find_faults(
    schedule: Schedule | Lowered,
    *,
    memory: MemoryLimit | None = None,
    channels: Channels | None = None,
    skips: Iterable[Sequence[int]] = (),
) -> list[Fault]:
    """Return all faults of a schedule, sorted by lane and index; the arguments are those of `verify`."""
    lowered = schedule if isinstance(schedule, Lowered) else None
    plan = schedule.schedule if isinstance(schedule, Lowered) else schedule
    pairs = check_skips(skips)
    if lowered and pairs:
        raise UsageError("a lowered schedule already has its skips: leave skips= out")
    used = check_channels(channels or (lowered.channels if lowered else "tagged"))
    rows = lowered.rows if lowered else Rows.of(plan)
    faults = list(find_unknown(plan, rows, is_lowered=lowered is not None))
    if faults:  # these actions cannot be looked up: continue without them
        rows = rows.without([(fault.lane, fault.index) for fault in faults])
    flow = trace_flow(plan, rows, skips=lowered.skips if lowered else pairs)
    faults += find_incomplete(plan, flow)
    if plan.versions is not None or Kind.U in rows.present:
        faults += _find_version_faults(plan)
    faults += _find_ordering(schedule, plan, flow, used, is_complete=not faults)
    if memory is not None:
        faults += (Fault("memory", *fault) for fault in find_over_limit(plan, rows, memory))
    return sorted(set(faults), key=lambda fault: (fault.lane, fault.index, fault.kind, fault.message))


# ---- versions of weights


def _find_version_faults(schedule: Schedule) -> Iterator[Fault]:
    """Yield a fault for each action with an invalid version.

    Version 0 exists at the start, and the n-th update of a stage makes version n. A forward may use any version
    that was made before it. A backward must use the version of its forward.
    """
    used_by_forward: dict[tuple[int, int], int] = {}
    for number, lane in enumerate(schedule.lanes):
        fault_at = partial(Fault, "version", number)
        newest: dict[int, int] = {}
        unused: dict[int, int] = {}  # for each stage, the index of the newest gradient that no update has used
        for index, action in enumerate(lane):
            version, key = schedule.version(number, index), (action.stage, action.mb)
            if action.kind in (Kind.B, Kind.W):
                unused[action.stage] = index
            if action.kind is Kind.U:
                unused.pop(action.stage, None)
                made = newest[action.stage] = newest.get(action.stage, 0) + 1
                if version != made:
                    yield fault_at(index, f"{action} makes version {made} of stage {action.stage}, not {version}")
            elif action.kind is Kind.F:
                used_by_forward[key] = version
                here = newest.get(action.stage, 0)
                if not 0 <= version <= here:
                    yield fault_at(index, f"{action} uses version {version}, but the newest of its stage is {here}")
            elif key in used_by_forward and version != used_by_forward[key]:
                used = used_by_forward[key]
                yield fault_at(index, f"{action} uses version {version}, but its forward used {used}")
        for stage, index in unused.items():
            yield fault_at(index, f"{lane[index]} makes a gradient that no update of stage {stage} uses")


# ---- the order of actions


def _find_ordering(
    schedule: Schedule | Lowered, plan: Schedule, flow: Flow, channels: Channels, *, is_complete: bool
) -> Iterator[Fault]:
    """Yield faults of the order: deadlocks, and on channels without tags, ends that disagree."""
    # in an incomplete schedule, the positions of overlaps are unknown; invalid overlaps are reported separately
    overlaps = plan if is_complete else replace(plan, overlaps=frozenset())
    stuck = list(_find_stuck(overlaps, flow, blocking=False))
    yield from stuck
    if isinstance(schedule, Lowered) and channels != "tagged":
        yield from _find_channel_faults(flow)
    if is_complete and channels == "blocking" and not stuck:
        skips = [edge for edge in flow.edges if edge[1] - edge[0] > 1]
        lowered = schedule if isinstance(schedule, Lowered) else lower(plan, skips=skips, channels=channels)
        for fault in _find_stuck(plan, lowered.flow, blocking=True):
            yield _as_built(fault, lowered, schedule)


def _as_built(fault: Fault, lowered: Lowered, given: Schedule | Lowered) -> Fault:
    """Move a fault from the lowered lane to the nearest preceding action of the schedule as built."""
    if isinstance(given, Lowered):
        return fault
    rows, begin = lowered.rows, int(lowered.rows.starts[fault.lane])
    kinds = rows.kind[begin : begin + fault.index]
    built = np.isin(kinds, [KIND_INDEX[kind] for kind in BUILT]).sum()
    return replace(fault, index=min(int(built), len(given.lanes[fault.lane]) - 1))


def _find_stuck(schedule: Schedule, flow: Flow, *, blocking: bool) -> Iterator[Fault]:
    """Run the lanes without a clock; yield a fault for each lane that stops forever.

    With `blocking`, sends and receives block their lane until the other end is reached.
    """
    rows = flow.rows
    needs = wait_together(flow.needs, *pair_rows(schedule, rows))
    if blocking:
        needs = _with_partners(rows, needs)
    zeros = np.zeros(len(rows))
    run = advance(Queues(rows.starts[:-1], rows.starts[1:], np.arange(schedule.num_lanes), needs, zeros, zeros))
    if run.is_done:
        return
    ended = ~np.isnan(run.start)
    for lane in range(schedule.num_lanes):
        at = int(run.stopped_at[lane])
        if at < rows.starts[lane + 1]:
            waits = " and ".join(_describe(rows, lane, int(n)) for n in needs[at] if n >= 0 and not ended[n])
            yield Fault("deadlock", lane, rows.index(at), f"{rows.action(at)} waits forever for {waits}")


def _describe(rows: Rows, lane: int, at: int) -> str:
    where = "which comes later on the same lane" if rows.lane[at] == lane else f"on lane {rows.lane[at]}"
    return f"{rows.action(at)} {where} (action {rows.index(at)})"


def _with_partners(rows: Rows, given: Ints) -> Ints:
    """Let each send wait for the action before its receive, and each receive for the action before its send."""
    receives = _receives(rows)
    sends = given[receives, 0]
    extra = np.full((len(rows), 1), NONE, dtype=np.int32)
    needs = given.copy()
    extra[sends, 0], needs[receives, 0] = _before(rows, receives), _before(rows, sends)
    return np.concatenate([needs, extra], axis=1)


def _receives(rows: Rows) -> NDArray[np.int64]:
    return np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in occupying(Where.NOTHING)]))


def _before(rows: Rows, at: NDArray[np.integer]) -> Ints:
    return np.where(at > rows.starts[rows.lane[at]], at - 1, NONE).astype(np.int32)


def _find_channel_faults(flow: Flow) -> Iterator[Fault]:
    """Yield a fault for each receive that is not in the order of the sends of its channel."""
    rows, receives = flow.rows, _receives(flow.rows)
    sends = flow.needs[receives, 0]
    receives, sends = receives[sends >= 0], sends[sends >= 0]
    channel = rows.lane[sends].astype(np.int64) * (int(rows.lane.max(initial=0)) + 1) + rows.lane[receives]
    order = np.lexsort((receives, channel))
    expected = sends[np.lexsort((sends, channel))]
    for k in np.flatnonzero(sends[order] != expected).tolist():
        at, due = int(receives[order[k]]), int(expected[k])
        message = f"the next message from lane {rows.lane[due]} is that of {rows.action(due)}"
        text = f"{rows.action(at)} is posted here, but {message}"
        yield Fault("channel", int(rows.lane[at]), rows.index(at), text)


# ---- the excerpt: the lanes around a fault


def _draw_grid(lanes: Sequence[Sequence[str]], *, at: Mapping[int, int], marked: tuple[int, int]) -> str:
    """Return the texts of the lanes around one action each, with one action marked.

    Args:
        lanes: the texts of the actions of each lane.
        at: the index to show in the middle, for some lanes; other lanes use the index of `marked`.
        marked: (lane, index) of the action to mark.
    """
    shown = _near(len(lanes), marked[0], set(at))
    cells: list[list[str]] = []
    for lane in shown:
        centre = at.get(lane, marked[1])
        window = range(centre - _AROUND, centre + _AROUND + 1)
        cells.append([_cell(lanes[lane], i, is_marked=(lane, i) == marked) for i in window])
    width = max(len(cell) for row in cells for cell in row)
    label = max(len(str(lane)) for lane in shown)
    lines = [
        f"lane {lane:>{label}} | " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for lane, row in zip(shown, cells, strict=True)
    ]
    if hidden := len(lanes) - len(shown):
        lines.append(f"({hidden} more lane{'s' if hidden > 1 else ''})")
    return "\n".join(lines)


def _near(num_lanes: int, lane: int, others: set[int]) -> list[int]:
    wanted = {lane, *sorted(others, key=lambda other: abs(other - lane))[: _MOST_LANES - 1]}
    for distance in range(1, num_lanes):
        if len(wanted) >= min(_MOST_LANES, num_lanes):
            break
        wanted |= {other for other in (lane - distance, lane + distance) if 0 <= other < num_lanes}
    return sorted(wanted)


def _cell(lane: Sequence[str], index: int, *, is_marked: bool) -> str:
    text = lane[index] if 0 <= index < len(lane) else ("·" if index < 0 else "")
    return f">{text or 'end'}<" if is_marked else f" {text} "
