"""Verify: every schedule passes, and every way of breaking one is caught."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import NAMES, OPEN, build_or_none, every_schedule
from oracle import is_complete, run_slowly
from penstock import Costs, schedules
from penstock.errors import CostError, ScheduleError, UsageError, VerifyError
from penstock.schedule.actions import Action, Kind, Lane
from penstock.schedule.lower import Lowered, lower
from penstock.schedules import Schedule, find_faults, verify


def with_lane(schedule, lane, actions):
    lanes = list(schedule.lanes)
    lanes[lane] = Lane.of(actions)
    return replace(schedule, lanes=tuple(lanes), overlaps=frozenset(), versions=None)


@pytest.mark.parametrize("schedule", every_schedule())
def test_every_schedule_can_run(schedule):
    verify(schedule)
    assert is_complete(schedule)


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("per_lane", [2, 4, 6])
@pytest.mark.parametrize(("lanes", "mbs"), [(1, 3), (2, 5), (3, 4), (4, 1), (4, 11), (5, 7)])
def test_schedules_of_several_stages_a_lane_can_run(name, per_lane, lanes, mbs):
    verify(schedules.build(name, lanes=lanes, micro_batches=mbs, stages_per_lane=per_lane))


@st.composite
def valid(draw):
    names = [name for name in NAMES if not name.startswith("pipedream")]
    schedule = build_or_none(draw(st.sampled_from(names)), 2 * draw(st.integers(1, 2)), draw(st.integers(1, 5)))
    return replace(schedule, overlaps=frozenset())


@given(valid(), st.data())
def test_a_dropped_action_is_caught(schedule, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    index = data.draw(st.integers(0, len(schedule.lanes[lane]) - 1))
    actions = list(schedule.lanes[lane])
    dropped = actions.pop(index)
    faults = find_faults(with_lane(schedule, lane, actions))
    assert any(fault.kind in ("missing", "unmet") for fault in faults)
    assert any(str(dropped) in fault.message for fault in faults)


@given(valid(), st.data())
def test_a_repeated_action_is_caught(schedule, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    actions = list(schedule.lanes[lane])
    again = data.draw(st.sampled_from(actions))
    actions.insert(data.draw(st.integers(0, len(actions))), again)
    faults = find_faults(with_lane(schedule, lane, actions))
    assert any(fault.kind == "repeated" and str(again) in fault.message for fault in faults)


@given(valid(), st.data())
def test_an_action_on_another_lane_is_caught(schedule, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    other = (lane + 1) % schedule.num_lanes
    actions, others = list(schedule.lanes[lane]), list(schedule.lanes[other])
    moved = actions.pop(data.draw(st.integers(0, len(actions) - 1)))
    others.insert(data.draw(st.integers(0, len(others))), moved)
    broken = with_lane(with_lane(schedule, lane, actions), other, others)
    assert any(fault.kind == "misplaced" and str(moved) in fault.message for fault in find_faults(broken))


@given(valid(), st.data())
def test_an_action_of_another_kind_is_caught(schedule, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    actions = list(schedule.lanes[lane])
    index = data.draw(st.integers(0, len(actions) - 1))
    kinds = [kind for kind in Kind if kind not in (actions[index].kind, Kind.U)]
    actions[index] = actions[index]._replace(kind=data.draw(st.sampled_from(kinds)))
    assert find_faults(with_lane(schedule, lane, actions))


@settings(max_examples=200)
@given(valid(), st.data())
def test_any_other_order_is_caught_exactly_when_it_deadlocks(schedule, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    actions = list(schedule.lanes[lane])
    first, second = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[first], actions[second] = actions[second], actions[first]
    broken = with_lane(schedule, lane, actions)
    can_run = run_slowly(broken, lambda kind, stage: 1.0) is not None
    faults = find_faults(broken)
    assert bool(faults) != can_run
    assert all(fault.kind == "deadlock" for fault in faults)


@given(valid(), st.integers(0, 3), st.data())
def test_an_unknown_stage_or_micro_batch_is_caught(schedule, extra, data):
    lane = data.draw(st.integers(0, schedule.num_lanes - 1))
    actions = list(schedule.lanes[lane])
    strange = data.draw(
        st.sampled_from([Action(Kind.F, schedule.num_stages + extra, 0), Action(Kind.B, 0, schedule.num_mbs + extra)])
    )
    actions.insert(data.draw(st.integers(0, len(actions))), strange)
    faults = find_faults(with_lane(schedule, lane, actions))
    assert [fault.kind for fault in faults] == ["unknown"]
    assert str(strange) in faults[0].message


@given(st.sampled_from(["pipedream", "pipedream_2bw"]), st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_wrong_weight_version_is_caught(name, lanes, mbs, data):
    schedule = schedules.build(name, lanes=lanes, micro_batches=mbs)
    lane = data.draw(st.integers(0, lanes - 1))
    index = data.draw(st.integers(0, len(schedule.lanes[lane]) - 1))
    used = schedule.versions[lane].copy()
    used[index] += data.draw(st.sampled_from([-9, 9]))
    versions = tuple(used if n == lane else v for n, v in enumerate(schedule.versions))
    assert any(fault.kind == "version" for fault in find_faults(replace(schedule, versions=versions)))


def test_a_backward_with_other_weights_than_its_forward_is_caught():
    schedule = Schedule.of(["0F0@0 0F1@0 0B0@0 0U0@1 0B1@1 0U1@2"])
    (fault,) = find_faults(schedule)
    assert (fault.kind, fault.index) == ("version", 4)
    assert "its forward used 0" in fault.message


@given(valid())
def test_memory_over_the_limit_is_caught_at_the_first_action_that_passes_it(schedule):
    peak = penstock_peak(schedule)
    verify(schedule, memory_limit=max(peak))
    if max(peak) > 1:
        with pytest.raises(VerifyError) as error:
            verify(schedule, memory_limit=max(peak) - 1)
        assert {fault.lane for fault in error.value.faults} == {n for n, p in enumerate(peak) if p == max(peak)}
        assert all(schedule.lanes[f.lane][f.index].kind is Kind.F for f in error.value.faults)


def penstock_peak(schedule):
    from penstock import simulate

    return simulate(schedule).peak_saved


def test_a_limit_a_lane_and_bytes_a_stage():
    schedule = schedules.build("zb_h1", lanes=2, micro_batches=4)
    costs = Costs(saved_bytes=[10, 20], pending_bytes=[1, 2])
    with pytest.raises(VerifyError) as error:
        verify(schedule, costs=costs, memory_limit=[21, 21.5])
    assert [(f.kind, f.lane) for f in error.value.faults] == [("memory", 1)]
    assert "limit: 21.5" in str(error.value)


def test_all_faults_are_reported_at_once_with_the_lanes_around_the_first():
    broken = Schedule((Lane.of("0F0 0F1 0F1 0B0"), Lane.of("1F0 1F1 1B0 0B1 7F0 1I1 1B1")), ((0, 1),), 2, name="broken")
    with pytest.raises(VerifyError) as error:
        verify(broken)
    kinds = {fault.kind for fault in error.value.faults}
    assert {"repeated", "misplaced", "unknown"} <= kinds
    text = str(error.value)
    assert "broken cannot run" in text
    assert ">0F1<" in text
    assert "lane 1 |" in text


def test_a_need_that_nothing_meets_names_what_is_missing():
    with pytest.raises(VerifyError, match=r"0B0 needs the gradient of stage 1 .* 1B0 or 1I0 is missing"):
        verify(Schedule.of(["0F0 0B0", "1F0"]))


def test_a_deadlock_says_who_waits_for_whom():
    broken = Schedule.of(["0F0 0F1 0B1 0B0", "1F0 1F1 1B0 1B1"])
    verify(broken)  # 0B1 waits for 1B1, which comes: an odd order, but it runs
    crossed = Schedule.of(["0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1"])
    with pytest.raises(VerifyError) as error:
        verify(crossed)
    assert "0B1 waits forever for 1B1 on lane 1 (action 3)" in str(error.value)
    assert "1F0 waits forever for 0F0 on lane 0 (action 2)" in str(error.value)


def test_channels_without_tags_must_see_one_order():
    """Lane 1 uses micro-batch 1 first; a channel without tags hands it micro-batch 0."""
    schedule = Schedule.of(["0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"])
    verify(schedule)
    tagged = lower(schedule)
    assert find_faults(tagged, channels="tagged") == []
    faults = find_faults(tagged, channels="ordered")
    assert {fault.kind for fault in faults} == {"channel"}
    assert any(
        "1RECV_F1 is posted here, but the next message from lane 0 is that of 0SEND_F0" in f.message for f in faults
    )
    verify(lower(schedule, channels="ordered"), channels="ordered")


@pytest.mark.parametrize("schedule", every_schedule())
def test_every_schedule_can_be_lowered_for_channels_without_tags(schedule):
    lowered = lower(schedule, channels="ordered")
    verify(lowered, channels="ordered")
    verify(lower(schedule))


def test_sends_that_wait_for_their_receive_deadlock_where_two_lanes_send_to_each_other():
    """The reason why 1f1b on blocking channels needs fused sends and receives."""
    schedule = schedules.build("1f1b", lanes=4, micro_batches=6)
    verify(schedule, channels="ordered")
    with pytest.raises(VerifyError, match="waits forever") as error:
        verify(schedule, channels="blocking")
    assert {fault.kind for fault in error.value.faults} == {"deadlock"}
    verify(schedules.build("gpipe", lanes=4, micro_batches=6), channels="blocking")


def test_a_transfer_that_is_missing_from_a_lowered_schedule_is_caught():
    lowered = lower(schedules.build("1f1b", lanes=2, micro_batches=2))
    rows = lowered.rows
    keep = np.ones(len(rows), dtype=bool)
    keep[rows.where(Kind.SEND_F)[0]] = False
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows.lane[keep], minlength=2))])
    columns = {name: getattr(rows, name)[keep] for name in ("kind", "stage", "mb", "lane", "peer")}
    broken = Lowered(lowered.schedule, replace(rows, **columns, starts=starts), lowered.keep)
    faults = find_faults(broken)
    assert any("1RECV_F0 needs the sent activation of stage 0" in fault.message for fault in faults)


@pytest.mark.parametrize(
    ("overlaps", "message"),
    [
        ({(0, 9)}, "no action follows"),
        ({(5, 0)}, "no action follows"),
        ({(0, 0)}, "only a forward followed by a backward"),
        ({(0, 1), (0, 2)}, "overlaps another"),
    ],
)
def test_overlaps_that_cannot_be_are_caught(overlaps, message):
    schedule = replace(schedules.build("1f1b", lanes=2, micro_batches=3), overlaps=frozenset(overlaps))
    assert any(fault.kind == "overlap" and message in fault.message for fault in find_faults(schedule))


def test_a_pair_that_waits_for_itself_is_caught():
    (fault,) = find_faults(Schedule.of(["(0F0;0B0)"]))
    assert fault.kind == "deadlock"


def test_a_pair_has_its_forward_first():
    """The story: backward first, the forward was given the memory and the slot that the backward still used."""
    faults = find_faults(Schedule.of(["0F0 (0B0;0F1) 0B1"]))
    assert [fault.kind for fault in faults] == ["overlap"]


def test_pairs_are_verified_in_lowered_schedules_too():
    """The story: with a transfer among the rows, the pair that waits for itself passed."""
    schedule = Schedule.of(["0F0 0B0", "(1F0;1B0)"])
    assert {fault.kind for fault in find_faults(schedule)} == {"deadlock"}
    assert {fault.kind for fault in find_faults(lower(schedule))} == {"deadlock"}


def test_memory_of_lowered_schedules_knows_what_is_kept():
    """The story: what a recomputing stage's forward threw away was counted."""
    costs = Costs(saved_bytes=1.0, input_bytes=0.01)
    lowered = lower(schedules.build("gpipe", lanes=2, micro_batches=4), keep="recompute")
    verify(lowered, costs=costs, memory_limit=1.05)
    with pytest.raises(VerifyError, match=r"its peak is 1\.04"):
        verify(lowered, costs=costs, memory_limit=1.03)


def test_places_are_those_of_the_schedule_as_given_also_beside_unknown_actions():
    """The story: places were counted without the unknown action."""
    faults = find_faults(Schedule((Lane.of("0F7 0B0 0F0"),), ((0,),), 1))
    assert [(fault.kind, fault.index) for fault in faults] == [("unknown", 0), ("deadlock", 1)]
    assert "0F0 which comes later on the same lane (action 2)" in faults[1].message


def test_a_lowered_schedule_is_verified_for_the_channels_it_was_lowered_for():
    lowered = lower(schedules.build("1f1b", lanes=3, micro_batches=4), channels="blocking")
    with pytest.raises(VerifyError, match="waits forever"):
        verify(lowered)
    verify(lowered, channels="ordered")


def test_arguments_that_cannot_be_are_refused():
    schedule = schedules.build("1f1b", lanes=2, micro_batches=2)
    with pytest.raises(ScheduleError, match="Did you mean 'tagged'"):
        verify(schedule, channels="taged")
    with pytest.raises(UsageError, match="already has its skips"):
        verify(lower(schedule), skips=[(0, 1)])
    with pytest.raises(CostError, match="saved_bytes"):
        verify(schedule, costs=Costs(forward=1.0), memory_limit=1)


def test_a_gradient_that_no_update_uses_is_caught():
    (fault,) = find_faults(Schedule.of(["0F0@0 0F1@0 0B0@0 0U0@1 0B1@0"]))
    assert fault.kind == "version"
    assert "no update" in fault.message


def test_skips_are_verified():
    schedule = schedules.build("1f1b", lanes=4, micro_batches=4)
    verify(schedule, skips=[(0, 2), (1, 3)])
    with pytest.raises(ValueError, match=r"skip: \(2, 1\)"):
        verify(schedule, skips=[(2, 1)])
