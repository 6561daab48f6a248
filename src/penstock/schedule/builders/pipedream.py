"""pipedream, pipedream_2bw: asynchronous 1f1b, where weights change within the step (Narayanan et al., 2019, 2021).

There is no flush. A stage updates its weights (action U) as soon as it has enough gradients, and later forwards
use the new weights. A backward uses the version that its forward used, so older versions are stashed until then.
The schedule records the version that each action uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.actions import KIND_INDEX, MAX_MBS, Ints, Kind, Lane, decode
from penstock.schedule.builders.ticks import from_ticks, one_f_one_b
from penstock.schedule.counts import check_count, loop
from penstock.schedule.schedule import Schedule


def pipedream(*, lanes: int, micro_batches: int) -> Schedule:
    """Update after every backward; a forward uses the newest weights, so lane s stashes lanes - s versions."""
    schedule = _asynchronous("pipedream", lanes, micro_batches, update_every=1)
    return _with_versions(schedule, lambda mb, updates_before: updates_before)


def pipedream_2bw(*, lanes: int, micro_batches: int, update_every: int | None = None) -> Schedule:
    """Update after each group of micro-batches; a group uses the version before the newest, so two are enough.

    Args:
        lanes: number of lanes.
        micro_batches: number of micro-batches.
        update_every: number of micro-batches in a group: at least the number of lanes, which is the default.
    """
    group = lanes if update_every is None else check_count("update_every", update_every, MAX_MBS)
    if group < lanes:
        raise ScheduleError(
            "pipedream_2bw keeps only two versions, so a group needs at least as many micro-batches as lanes; "
            f"update_every: {group}, use {lanes} or more"
        )
    schedule = _asynchronous("pipedream_2bw", lanes, micro_batches, update_every=group)
    return _with_versions(schedule, lambda mb, updates_before: np.maximum(mb // group - 1, 0))


def _asynchronous(name: str, lanes: int, micro_batches: int, *, update_every: int) -> Schedule:
    plain = one_f_one_b(warm_up=lambda s, m: lanes - s)
    # an update follows the backward that completes its group (or the step)
    ticks = {Kind.B: plain[Kind.B], Kind.U: plain[Kind.B], Kind.F: plain[Kind.F]}
    with_all = from_ticks(name, [loop(lanes, 1)], num_mbs=micro_batches, ticks=ticks)
    keep = []
    for lane in with_all.lanes:
        kind, _, mb = decode(lane.codes)
        closes = ((mb + 1) % update_every == 0) | (mb == micro_batches - 1)
        keep.append(Lane(lane.codes[(kind != KIND_INDEX[Kind.U]) | closes]))
    return replace(with_all, lanes=tuple(keep))


def _with_versions(schedule: Schedule, version_of: Callable[[Ints, Ints], Ints]) -> Schedule:
    """Give each forward a version; a backward uses that of its forward, and an update makes the next version."""
    versions = []
    for lane in schedule.lanes:
        kind, _, mb = decode(lane.codes)
        updates = np.cumsum(kind == KIND_INDEX[Kind.U], dtype=np.int32)
        of_forward = np.zeros(schedule.num_mbs, dtype=np.int32)
        forward = kind == KIND_INDEX[Kind.F]
        of_forward[mb[forward]] = version_of(mb, updates)[forward]
        versions.append(np.where(kind == KIND_INDEX[Kind.U], updates, of_forward[mb]).astype(np.int32))
    return replace(schedule, versions=tuple(versions))
