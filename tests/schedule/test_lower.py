"""Lowering: transfers, skips, keep policies and slots."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import every_schedule
from penstock import schedules
from penstock.errors import ScheduleError, UsageError
from penstock.schedule.actions import Action, Kind
from penstock.schedule.flow import Rows
from penstock.schedule.lower import lower
from penstock.schedule.rules import RULES, Value
from penstock.schedule.verify import verify


def texts(lowered):
    return [" ".join(lane) for lane in lowered.lane_texts()]


@pytest.mark.parametrize("schedule", every_schedule())
def test_every_value_that_changes_lanes_is_sent_and_received_once(schedule):
    rows = lower(schedule).rows
    sent = {"F": set(), "B": set()}
    received = {"F": set(), "B": set()}
    for at in range(len(rows)):
        action, lane, peer = rows.action(at), int(rows.lane[at]), int(rows.peer[at])
        kind = action.kind.value
        if kind.startswith("SEND"):
            key = (action.stage, peer, action.mb, lane, schedule.home(peer, action.mb))
            assert key not in sent[kind[-1]]
            sent[kind[-1]].add(key)
        if kind.startswith("RECV"):
            received[kind[-1]].add((peer, action.stage, action.mb, schedule.home(peer, action.mb), lane))
    assert sent == received
    crossing = [
        (s, mb)
        for s in range(schedule.num_stages - 1)
        for mb in range(schedule.num_mbs)
        if schedule.home(s, mb) != schedule.home(s + 1, mb)
    ]
    assert len(sent["F"]) == len(sent["B"]) == len(crossing)


def test_what_stays_on_a_lane_is_not_sent():
    assert "SEND" not in str(lower(schedules.build("zb_v", lanes=1, micro_batches=3)))
    bottom = texts(lower(schedules.build("zb_v", lanes=2, micro_batches=1)))[1]
    assert "1SEND_F" not in bottom
    assert "2RECV_F" not in bottom


def test_skips_go_straight_from_lane_to_lane():
    lowered = lower(schedules.build("1f1b", lanes=4, micro_batches=1), skips=[(0, 3)])
    lanes = texts(lowered)
    assert "0SEND_F0>3" in lanes[0]
    assert "3RECV_F0>0" in lanes[3]
    assert "3SEND_B0>0" in lanes[3]
    assert "0RECV_B0>3" in lanes[0]
    assert ">" not in lanes[1] + lanes[2]
    verify(lowered)


def test_keep_policies_a_stage():
    lowered = lower(schedules.build("1f1b", lanes=3, micro_batches=2), keep=["recompute", "offload", "hold"])
    lanes = texts(lowered)
    assert lanes[0].count("RECOMPUTE") == 2
    assert lanes[0].index("0RECOMPUTE0") < lanes[0].index("0RECV_B0")  # it does not wait for the gradient
    assert lanes[1].count("OFFLOAD") == lanes[1].count("FETCH") == 2
    assert "RECOMPUTE" not in lanes[2]
    assert "OFFLOAD" not in lanes[2]
    verify(lowered)


@pytest.mark.parametrize("schedule", every_schedule())
@pytest.mark.parametrize("keep", ["recompute", "offload"])
def test_every_schedule_verifies_with_every_policy(schedule, keep):
    verify(lower(schedule, keep=keep))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("recomput", "Did you mean 'recompute'"),
        (["hold"], "policies: 1, stages: 2"),
        (["hold", "x"], "'x' is not one of"),
    ],
)
def test_wrong_policies_are_refused(keep, message):
    with pytest.raises(ScheduleError, match=message):
        lower(schedules.build("1f1b", lanes=2, micro_batches=2), keep=keep)


def test_wrong_channels_and_skips_are_refused():
    schedule = schedules.build("1f1b", lanes=2, micro_batches=2)
    with pytest.raises(ScheduleError, match="tagged, ordered, blocking"):
        lower(schedule, channels="tcp")
    with pytest.raises(ScheduleError, match="skip"):
        lower(schedule, skips=[(1, 0)])


def test_overlapping_neighbours_stay_neighbours():
    schedule = schedules.build("dualpipe_v", lanes=2, micro_batches=4)
    for keep in ("hold", "recompute", "offload"):
        rows = lower(schedule, keep=keep).rows
        for lane, index in schedule.overlaps:
            first, second = schedule.lanes[lane][index], schedule.lanes[lane][index + 1]
            places = [at for at in range(len(rows)) if rows.lane[at] == lane and rows.action(at) in (first, second)]
            assert places[1] == places[0] + 1


@pytest.mark.parametrize(
    "lanes",
    [["0F0 0F1 0B0"], ["0F0 0F1"], [""], ["0F0 0B0 0F0"], ["0F0 1B0", "1F0 0B0"], ["0F0 0B0", ""]],
)
@pytest.mark.parametrize("keep", ["hold", "recompute", "offload"])
def test_what_lacks_actions_is_refused_whatever_is_kept(lanes, keep):
    schedule = schedules.Schedule(lanes, (tuple(range(len(lanes))),), 2)
    with pytest.raises(ScheduleError, match="cannot run"):
        lower(schedule, keep=keep)


def test_only_a_schedule_can_be_lowered():
    lowered = lower(schedules.build("1f1b", lanes=2, micro_batches=2))
    for wrong in (lowered, "1f1b", None):
        with pytest.raises(UsageError, match="only a schedule"):
            lower(wrong)


@pytest.mark.parametrize("skips", [[(0,)], [(0, 1, 2)], [5], None, [(0.7, 2)], ["02"]])
def test_what_is_no_skip_is_refused(skips):
    with pytest.raises(ScheduleError, match="skips must be pairs"):
        lower(schedules.build("1f1b", lanes=3, micro_batches=2), skips=skips)


def test_a_schedule_that_lacks_actions_cannot_be_lowered():
    with pytest.raises(ScheduleError, match="1B0 or 1W0 is missing"):
        lower(schedules.Schedule.of(["0F0 0B0", "1F0"]))


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe", "interleaved_1f1b"]),
    lanes=st.sampled_from([2, 4]),
    mbs=st.integers(1, 7),
    keep=st.sampled_from(["hold", "recompute", "offload"]),
    channels=st.sampled_from(["tagged", "ordered"]),
)
def test_no_two_living_values_share_a_slot_and_no_slot_is_wasted(name, lanes, mbs, keep, channels):
    """Replays the lanes: a value holds its slot from the action that makes it to the one that frees it."""
    schedule = schedules.build(name, lanes=lanes, micro_batches=mbs)
    lowered = lower(schedule, keep=keep, skips=[(0, schedule.num_stages - 1)], channels=channels)
    rows: Rows = lowered.rows
    living = defaultdict(dict)
    most = defaultdict(int)
    backward = [Value.GRADIENT, Value.SAVED, Value.ACTIVATION]
    frees = {Kind.F: [Value.ACTIVATION], Kind.B: backward, Kind.I: backward, Kind.W: [Value.PENDING]}
    frees |= {Kind.OFFLOAD: [Value.SAVED]}
    if keep == "recompute":  # it starts from its input, which stays until then
        frees[Kind.F] = []
    for at in range(len(rows)):
        action: Action = rows.action(at)
        lane, peer, slot = int(rows.lane[at]), int(rows.peer[at]), int(lowered.slots.of[at])
        if slot >= 0:
            rule = RULES[action.kind]
            value = next(
                v for v in (*rule.remakes, *rule.makes) if v in (Value.SAVED, Value.PENDING) or v in rule.remakes
            )
            pool = living[lane, action.stage, value, peer]
            assert slot not in pool
            pool[slot] = action.mb
            most[lane, action.stage, value, peer] = max(most[lane, action.stage, value, peer], len(pool))
        for key, pool in living.items():
            if key[:2] == (lane, action.stage) and key[2] in frees.get(action.kind, []):
                for held in [s for s, mb in pool.items() if mb == action.mb]:
                    del pool[held]
    assert not any(living.values())
    assert dict(most) == lowered.slots.counts
