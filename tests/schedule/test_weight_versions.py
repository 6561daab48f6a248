"""Asynchronous schedules: which weights each action uses, and how many versions a lane stashes."""

import numpy as np
import pytest

from penstock import schedules
from penstock.schedule.actions import KIND_INDEX, Kind, decode


def stashed_versions(schedule):
    """Return the maximum number of weight versions that each lane holds at once.

    A version is held from the update that makes it until the last forward that uses it, and the backwards of these
    forwards, have run.
    """
    if schedule.versions is None:
        return (1,) * schedule.num_lanes
    return tuple(most_alive(lane.codes, used) for lane, used in zip(schedule.lanes, schedule.versions, strict=True))


def most_alive(codes, used):
    """Count the versions of one lane: each lives from the update that makes it to its last use."""
    kind, stage, _ = decode(codes)
    events = np.zeros(len(codes) + 1, dtype=np.int64)
    for here in np.unique(stage):
        of_stage = np.flatnonzero(stage == here)
        is_update = kind[of_stage] == KIND_INDEX[Kind.U]
        made_at = np.concatenate([[0], of_stage[is_update]])
        last_use = made_at.copy()
        np.maximum.at(last_use, used[of_stage][~is_update], of_stage[~is_update])
        np.add.at(events, made_at, 1)
        np.add.at(events, last_use + 1, -1)
    return int(np.cumsum(events).max())


@pytest.mark.parametrize(("lanes", "mbs"), [(1, 4), (2, 3), (4, 9), (5, 20)])
def test_pipedream_forwards_use_the_newest_weights_and_lane_s_stashes_lanes_minus_s(lanes, mbs):
    schedule = schedules.build("pipedream", lanes=lanes, micro_batches=mbs)
    for number, lane in enumerate(schedule.lanes):
        newest = 0
        for index, action in enumerate(lane):
            if action.kind is Kind.U:
                newest += 1
            elif action.kind is Kind.F:
                assert schedule.version(number, index) == newest
    assert stashed_versions(schedule) == tuple(min(lanes - s, mbs) for s in range(lanes))


@pytest.mark.parametrize(("lanes", "mbs", "group"), [(2, 8, 2), (4, 16, 4), (4, 25, 6), (3, 2, 3)])
def test_pipedream_2bw_needs_two_versions_and_is_one_update_late(lanes, mbs, group):
    schedule = schedules.build("pipedream_2bw", lanes=lanes, micro_batches=mbs, update_every=group)
    assert max(stashed_versions(schedule)) <= 2
    for number, lane in enumerate(schedule.lanes):
        for index, action in enumerate(lane):
            if action.kind in (Kind.F, Kind.B):
                assert schedule.version(number, index) == max(action.mb // group - 1, 0)


def test_synchronous_schedules_have_one_version():
    schedule = schedules.build("zb_h1", lanes=3, micro_batches=4)
    assert schedule.versions is None
    assert schedule.version(1, 2) == 0
    assert stashed_versions(schedule) == (1, 1, 1)
