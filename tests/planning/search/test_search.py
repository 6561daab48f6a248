"""Search and auto: never worse than what it is measured against, within its memory, the same every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import NAMES
from penstock import Costs, schedules, simulate
from penstock.errors import PenstockError, ScheduleError
from penstock.planning.search.greedy import Problem, write_schedule
from penstock.planning.search.search import policies, polish, search
from penstock.schedule.counts import loop, snake

numbers = st.floats(0.2, 4.0)


@st.composite
def uneven(draw, lanes, per_lane=1):
    stages = lanes * per_lane
    column = st.lists(numbers, min_size=stages, max_size=stages)
    return Costs(
        forward=draw(column),
        input_grad=draw(column),
        weight_grad=draw(column),
        transfer=draw(st.floats(0, 0.5)),
        saved_bytes=draw(column),
        pending_bytes=0.4 * draw(numbers) / 4,
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_auto_is_never_worse_than_the_best_named_schedule_that_fits(data):
    lanes, mbs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    costs = data.draw(uneven(lanes))
    most = max(costs.saved_bytes) + costs.pending_bytes
    limit = data.draw(st.sampled_from([None, most * mbs, most * lanes, most * 2, most * 1.01]))
    fitting = {}
    for name in NAMES:
        if schedules.describe(name).trains_exactly and schedules.describe(name).stages_per_lane == 1:
            try:
                schedule = schedules.build(name, lanes=lanes, micro_batches=mbs, costs=costs, memory_limit=limit)
            except PenstockError:
                continue
            fitting[name] = simulate(schedule, costs).step_seconds
    auto = schedules.build("auto", lanes=lanes, micro_batches=mbs, costs=costs, memory_limit=limit)
    schedules.verify(auto, costs=costs, memory_limit=limit)
    time = simulate(auto, costs)
    if limit is not None:
        assert max(time.peak_bytes) <= limit * (1 + 1e-9)
    if fitting:
        assert time.step_seconds <= min(fitting.values()) * (1 + 1e-9)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_auto_with_several_stages_a_lane(data):
    lanes, mbs = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    costs = data.draw(uneven(lanes, per_lane=2))
    auto = schedules.build("auto", lanes=lanes, micro_batches=mbs, costs=costs)
    schedules.verify(auto)
    step = simulate(auto, costs).step_seconds
    for name in ("interleaved_1f1b", "looped_bfs", "zb_v", "v_half", "v_min", "dualpipe_v", "hanayo"):
        other = schedules.build(name, lanes=lanes, micro_batches=mbs, costs=costs)
        assert step <= simulate(other, costs).step_seconds * (1 + 1e-9)


def test_auto_without_costs_and_without_a_second_copy_of_the_weights():
    one_way = schedules.build("auto", lanes=4, micro_batches=8, two_ways=False)
    assert not one_way.is_bidirectional
    any_way = schedules.build("auto", lanes=4, micro_batches=8)
    assert simulate(any_way).step_seconds <= simulate(one_way).step_seconds


def test_auto_does_not_split_a_backward_that_is_cheaper_whole():
    costs = Costs(forward=1.0, backward=2.0, input_grad=2.0, weight_grad=2.0)
    auto = schedules.build("auto", lanes=2, micro_batches=6, costs=costs, two_ways=False)
    assert (
        simulate(auto, costs).step_seconds
        <= simulate(schedules.build("1f1b", lanes=2, micro_batches=6), costs).step_seconds
    )


def test_a_limit_that_nothing_fits_says_what_is_missing():
    with pytest.raises(ScheduleError, match=r"lane: 1, limit: 4 bytes, .* saves: 5 bytes"):
        schedules.build("auto", lanes=2, micro_batches=4, costs=Costs(saved_bytes=[1, 5]), memory_limit=4)


def test_a_limit_for_one_micro_batch_is_enough():
    costs = Costs(saved_bytes=5.0, pending_bytes=1.0)
    auto = schedules.build("auto", lanes=3, micro_batches=4, costs=costs, memory_limit=5.0)
    assert max(simulate(auto, costs).peak_bytes) <= 5.0


def test_auto_finds_what_fits_where_more_is_pending_than_saved():
    """The story: only split backwards were tried, which hold more there than whole ones."""
    costs = Costs(saved_bytes=1.0, pending_bytes=2.0)
    auto = schedules.build("auto", lanes=2, micro_batches=2, costs=costs, memory_limit=1.5)
    assert max(simulate(auto, costs).peak_bytes) <= 1.5


def test_auto_says_which_named_schedule_it_is():
    assert schedules.build("auto", lanes=2, micro_batches=4).name in ("auto: dualpipe", "auto: chimera")
    assert schedules.build("auto", lanes=1, micro_batches=1).name.startswith("auto")


def test_costs_that_lanes_cannot_share_are_refused():
    with pytest.raises(ScheduleError, match="5 stages, which cannot be divided evenly by 2 lanes"):
        schedules.build("auto", lanes=2, micro_batches=2, costs=Costs(forward=[1, 2, 3, 4, 5]))


def test_the_same_question_gets_the_same_answer():
    costs = Costs(forward=[1, 2, 1, 3], transfer=0.1)
    first, second = (schedules.build("auto", lanes=4, micro_batches=6, costs=costs) for _ in range(2))
    assert first == second


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_policies_write_is_a_schedule_with_the_length_they_say(data):
    lanes, mbs, per_lane = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    costs = data.draw(uneven(lanes, per_lane))
    lane_of = data.draw(st.sampled_from([loop, snake]))(lanes, per_lane)
    stage_costs = costs.for_stages(lanes * per_lane)
    room = max(
        sum(stage_costs.saved_bytes[s] for s, home in enumerate(lane_of) if home == lane) for lane in range(lanes)
    )
    limit = data.draw(st.sampled_from([float("inf"), 1.2 * room, 3.0 * room]))
    problem = Problem("p", lane_of, mbs, stage_costs, (limit,) * lanes, splits_backward=data.draw(st.booleans()))
    all_policies = list(policies(problem))
    draft = write_schedule(problem, all_policies[data.draw(st.integers(0, len(all_policies) - 1))])
    assert draft is not None  # room for one whole micro-batch is always enough
    schedules.verify(draft.schedule, costs=costs, memory_limit=limit)
    time = simulate(draft.schedule, costs)
    assert draft.step_seconds == pytest.approx(time.step_seconds)
    assert draft.span_seconds == pytest.approx(max(time.lane_seconds))
    better = polish(problem, draft, objective="step", rounds=40)
    schedules.verify(better.schedule, costs=costs, memory_limit=limit)
    assert better.step_seconds == pytest.approx(simulate(better.schedule, costs).step_seconds)
    assert better.step_seconds <= draft.step_seconds * (1 + 1e-12)


def test_forwards_never_lead_into_a_dead_end():
    """The story: lane 0 took three micro-batches' first stage (1 byte each), then none could enter its last (2)."""
    costs = Costs(saved_bytes=[1, 1, 1, 1, 1, 2]).for_stages(6)
    problem = Problem("p", snake(3, 2), 3, costs, (3.6,) * 3, splits_backward=False)
    for policy in policies(problem):
        assert write_schedule(problem, policy) is not None


def test_more_pending_than_saved_is_kept_within_the_limit():
    """The story: an input gradient that leaves more than it frees went over the limit."""
    costs = Costs(saved_bytes=0.6, pending_bytes=1.0)
    problem = Problem("p", (0, 1), 4, costs.for_stages(2), (1.2,) * 2)
    for policy in policies(problem):
        draft = write_schedule(problem, policy)
        assert max(simulate(draft.schedule, costs).peak_bytes) <= 1.2


def test_polish_shortens_what_can_be_shortened():
    """All weight gradients first: their lane is late with everything that others wait for."""
    costs = Costs(transfer=0.0).for_stages(2)
    slow = schedules.Schedule.of(["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1W0 1F1 1I1 1W1"])
    problem = Problem("p", (0, 1), 2, costs, (float("inf"),) * 2)
    from penstock.planning.search.greedy import Draft

    length = simulate(slow).step_seconds
    draft = polish(problem, Draft(slow, length, length), objective="step", rounds=50)
    assert length == 8
    assert draft.step_seconds == 7


def test_search_finds_the_optimum_of_equal_costs():
    """F = I = W, enough memory: the last lane starts late, and its work follows without a gap."""
    for lanes, mbs in ((2, 4), (4, 8), (4, 12)):
        problem = Problem("p", tuple(range(lanes)), mbs, Costs().for_stages(lanes), (np.inf,) * lanes)
        assert search(problem, objective="step").step_seconds == 3 * mbs + lanes - 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min"])
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_stages_that_take_no_time_end_the_search(name, micro_batches):
    """A swap across actions of no length deadlocked, and the walk along the critical path then never ended."""
    costs = Costs(
        forward=(2.0, 0.0, 2.0, 0.0, 0.0, 2.0, 1.0, 2.0),
        input_grad=(0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
        weight_grad=(1.0, 1.0, 0.0, 2.0, 1.0, 0.0, 0.0, 0.0),
    )
    schedules.verify(schedules.build(name, lanes=4, micro_batches=micro_batches, costs=costs))
