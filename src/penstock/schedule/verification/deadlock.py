"""Deadlock: find lanes that wait for each other in a cycle, and channels whose ends disagree about the order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import KINDS, Ints, Kind
from penstock.schedule.advance_lanes import Queues, advance
from penstock.schedule.flow import NONE, Flow, Rows
from penstock.schedule.overlaps import pair_rows, wait_together
from penstock.schedule.rules import RULES, Where
from penstock.schedule.schedule import Schedule


def find_stuck(schedule: Schedule, flow: Flow, *, blocking: bool) -> Iterator[tuple[int, int, str]]:
    """Run the lanes without a clock; yield (lane, index, message) for each lane that stops forever.

    Args:
        schedule: the schedule.
        flow: what its actions wait for.
        blocking: whether sends and receives block their lane until the other end is reached.
    """
    rows = flow.rows
    needs = wait_together(flow.needs, *pair_rows(schedule, rows))
    if blocking:
        needs = _with_partners(flow.rows, needs)
    zeros = np.zeros(len(rows))
    lanes = np.arange(schedule.num_lanes)
    run = advance(Queues(rows.starts[:-1], rows.starts[1:], lanes, needs, zeros, zeros))
    if run.is_done:
        return
    ended = ~np.isnan(run.start)
    for lane in range(schedule.num_lanes):
        at = int(run.stopped_at[lane])
        if at == rows.starts[lane + 1]:
            continue
        waits = [int(n) for n in needs[at] if n >= 0 and not ended[n]]
        yield (
            lane,
            rows.index(at),
            f"{rows.action(at)} waits forever for " + " and ".join(_describe(rows, lane, n) for n in waits),
        )


def _describe(rows: Rows, lane: int, at: int) -> str:
    where = "which comes later on the same lane" if rows.lane[at] == lane else f"on lane {rows.lane[at]}"
    return f"{rows.action(at)} {where} (action {rows.index(at)})"


def _with_partners(rows: Rows, given: Ints) -> Ints:
    """Let each send wait for the action before its receive, and each receive for the action before its send."""
    nothing = [k for k, kind in enumerate(KINDS) if RULES[kind].where is Where.NOTHING]
    receives = np.flatnonzero(np.isin(rows.kind, nothing))
    sends = given[receives, 0]
    extra = np.full((len(rows), 1), NONE, dtype=np.int32)
    needs = given.copy()
    extra[sends, 0], needs[receives, 0] = _before(rows, receives), _before(rows, sends)
    return np.concatenate([needs, extra], axis=1)


def _before(rows: Rows, at: NDArray[np.integer]) -> Ints:
    return np.where(at > rows.starts[rows.lane[at]], at - 1, NONE).astype(np.int32)


def find_channel_faults(flow: Flow) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, index, message) for each receive that is not in the order of the sends of its channel."""
    rows = flow.rows
    receives = np.flatnonzero(np.isin(rows.kind, [KINDS.index(kind) for kind in (Kind.RECV_F, Kind.RECV_B)]))
    sends = flow.needs[receives, 0]
    receives, sends = receives[sends >= 0], sends[sends >= 0]
    channel = rows.lane[sends].astype(np.int64) * (int(rows.lane.max(initial=0)) + 1) + rows.lane[receives]
    order = np.lexsort((receives, channel))
    expected = sends[np.lexsort((sends, channel))]
    for k in np.flatnonzero(sends[order] != expected).tolist():
        at, due = int(receives[order[k]]), int(expected[k])
        message = f"the next message from lane {rows.lane[due]} is that of {rows.action(due)}"
        yield int(rows.lane[at]), rows.index(at), f"{rows.action(at)} is posted here, but {message}"
