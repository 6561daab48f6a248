"""Asynchronous schedules: which weights each action uses, and how many versions a lane stashes."""

import pytest

from penstock import schedules
from penstock.schedule.actions import Kind
from penstock.schedule.verification.weight_versions import stashed_versions


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
