"""Verify: prove that a schedule can run, or raise an error that lists its faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import UsageError, VerifyError
from penstock.schedule.actions import KIND_INDEX, Kind
from penstock.schedule.flow import Flow, Rows, check_skips, trace_flow
from penstock.schedule.lower import Channels, Lowered, check_channels, lower
from penstock.schedule.overlaps import BUILT
from penstock.schedule.peak_memory import MemoryLimit, find_over_limit
from penstock.schedule.schedule import Schedule
from penstock.schedule.verification.deadlock import find_channel_faults, find_stuck
from penstock.schedule.verification.excerpt import draw_grid
from penstock.schedule.verification.weight_versions import find_version_faults
from penstock.schedule.violations import Fault, find_incomplete, find_unknown

__all__ = ["Fault", "find_faults", "verify"]

_MOST_SHOWN = 20


def verify(
    schedule: Schedule | Lowered,
    *,
    memory: MemoryLimit | None = None,
    channels: Channels | None = None,
    skips: Iterable[Sequence[int]] = (),
) -> None:
    """Return if a schedule can run; otherwise raise an error with all faults and the lanes around the first one.

    Args:
        schedule: a schedule or a lowered schedule.
        memory: the memory that stages need, and the limit of each lane.
        channels: how the transport matches receives to sends: "tagged", "ordered" or "blocking". The default is the
            choice made when lowering, or "tagged".
        skips: (from stage, to stage) for values that skip stages.

    Raises:
        VerifyError: its attribute `faults` has all faults.

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
        faults += (Fault("version", *fault) for fault in find_version_faults(plan))
    faults += _find_ordering(schedule, plan, flow, used, is_complete=not faults)
    if memory is not None:
        faults += (Fault("memory", *fault) for fault in find_over_limit(plan, rows, memory))
    return sorted(set(faults), key=lambda fault: (fault.lane, fault.index, fault.kind, fault.message))


def _find_ordering(
    schedule: Schedule | Lowered, plan: Schedule, flow: Flow, channels: Channels, *, is_complete: bool
) -> Iterator[Fault]:
    """Yield faults of the order: deadlocks, and on channels without tags, ends that disagree."""
    # in an incomplete schedule, the positions of overlaps are unknown; invalid overlaps are reported separately
    overlaps = plan if is_complete else replace(plan, overlaps=frozenset())
    stuck = [Fault("deadlock", *fault) for fault in find_stuck(overlaps, flow, blocking=False)]
    yield from stuck
    if isinstance(schedule, Lowered) and channels != "tagged":
        yield from (Fault("channel", *fault) for fault in find_channel_faults(flow))
    if is_complete and channels == "blocking" and not stuck:
        lowered = schedule if isinstance(schedule, Lowered) else lower(plan, skips=_skips_of(flow), channels=channels)
        for fault in find_stuck(plan, lowered.flow, blocking=True):
            yield _as_built(Fault("deadlock", *fault), lowered, schedule)


def _skips_of(flow: Flow) -> list[tuple[int, int]]:
    return [edge for edge in flow.edges if edge[1] - edge[0] > 1]


def _as_built(fault: Fault, lowered: Lowered, given: Schedule | Lowered) -> Fault:
    """Move a fault from the lowered lane to the nearest preceding action of the schedule as built."""
    if isinstance(given, Lowered):
        return fault
    rows, begin = lowered.rows, int(lowered.rows.starts[fault.lane])
    kinds = rows.kind[begin : begin + fault.index]
    built = np.isin(kinds, [KIND_INDEX[kind] for kind in BUILT]).sum()
    return replace(fault, index=min(int(built), len(given.lanes[fault.lane]) - 1))
