"""Simulation: closed forms, a second opinion, links, devices, recompute and offload."""

from itertools import pairwise
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from cases import every_schedule
from oracle import run_slowly
from penstock import Cluster, Costs, Link, schedules, simulate
from penstock.errors import CostError, ScheduleError, UsageError
from penstock.schedule.actions import Kind
from penstock.schedule.lower import lower

F, I, W, C = 3.0, 2.0, 1.5, 0.25
B = I + W
COUNTS = [(2, 2), (2, 7), (3, 3), (4, 8), (4, 9), (5, 12), (8, 24), (7, 3), (4, 1)]


def step(name, lanes, mbs, costs, **options):
    return simulate(schedules.build(name, lanes=lanes, micro_batches=mbs, **options), costs)


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_gpipe_takes_what_its_closed_form_says(p, m):
    time = step("gpipe", p, m, Costs(forward=F, backward=B, transfer=C))
    assert time.step_seconds == pytest.approx((m + p - 1) * (F + B) + 2 * (p - 1) * C)
    assert time.peak_saved == (m,) * p


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_zb_gpipe_takes_what_its_closed_form_says(p, m):
    time = step("zb_gpipe", p, m, Costs(forward=F, input_grad=I, weight_grad=W, transfer=C))
    assert time.step_seconds == pytest.approx(m * (F + I + W) + (p - 1) * (F + I + 2 * C))
    assert time.peak_saved == (m,) * p


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_gpipe_with_uneven_stages_takes_what_its_closed_form_says(p, m):
    rng = np.random.default_rng(p * 100 + m)
    f, b = rng.uniform(1, 3, p), rng.uniform(1, 5, p)
    time = step("gpipe", p, m, Costs(forward=f, backward=b, transfer=C))
    expected = f.sum() + b.sum() + (m - 1) * (f.max() + b.max()) + 2 * (p - 1) * C
    assert time.step_seconds == pytest.approx(expected)


@pytest.mark.parametrize(("p", "m"), COUNTS)
def test_1f1b_takes_what_its_closed_form_says(p, m):
    time = step("1f1b", p, m, Costs(forward=F, backward=B, transfer=C))
    waits = (p - 1) + (m - 1) - ceil((m - 1) / p)
    assert time.step_seconds == pytest.approx((m + p - 1) * (F + B) + 2 * C * waits)
    assert time.peak_saved == tuple(min(p - s, m) for s in range(p))


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 6, 3), (4, 4, 2), (4, 8, 2), (4, 12, 5), (8, 24, 3), (3, 9, 4)]
)
def test_interleaved_takes_what_its_closed_form_says(p, m, v):
    costs = Costs(forward=F / v, backward=B / v, transfer=C)
    time = step("interleaved_1f1b", p, m, costs, stages_per_lane=v)
    assert time.step_seconds == pytest.approx(m * (F + B) + (p - 1) * (F + B) / v + 2 * (p * v - 1) * C)
    assert time.peak_saved == tuple(min(2 * (p - 1 - s) + (v - 1) * p + 1, m * v) for s in range(p))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in COUNTS if m >= p])
def test_zb_h1_takes_what_its_closed_form_says(p, m):
    time = step("zb_h1", p, m, Costs(forward=F, input_grad=I, weight_grad=W))
    assert time.step_seconds == pytest.approx(m * (F + I + W) + (p - 1) * (F + I - W))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (4, 12), (8, 24), (3, 20)])
def test_zb_h2_takes_what_its_closed_form_says(p, m):
    time = step("zb_h2", p, m, Costs(forward=F, input_grad=I, weight_grad=W, transfer=C))
    assert max(time.lane_seconds) == pytest.approx(m * (F + I + W) + (p - 1) * (F + I - 2 * W + 2 * C))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 20), (8, 16), (8, 40), (6, 14)])
def test_dualpipe_takes_what_its_closed_form_says(p, m):
    time = step("dualpipe", p, m, Costs(forward=I, input_grad=I, weight_grad=W))
    both = I + B
    assert time.step_seconds == pytest.approx(m * (I + B) + (p / 2 - 1) * (both + B - 3 * W))
    assert time.peak_saved == (p + 1,) * p


def test_overlapped_pairs_start_together_and_take_the_time_that_costs_give_them():
    schedule = schedules.Schedule.of(["0F0 (0F1;0B0) 0B1"])
    apart = simulate(schedule, Costs(forward=2, backward=3))
    together = simulate(schedule, Costs(forward=2, backward=3, overlapped=4))
    assert (apart.step_seconds, together.step_seconds) == (10, 9)
    spans = {str(span.action): (span.start, span.end) for span in together}
    assert spans["0F1"] == spans["0B0"] == (2, 6)
    assert together.busy_seconds == (9,)  # what overlaps counts once
    assert together.bubble == 0


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16])
def test_v_shapes_hold_what_their_papers_say(p):
    costs = Costs(forward=0.5, backward=1.0, saved_bytes=0.5, pending_bytes=0.5)  # held until the weight gradient
    for name, units in (("zb_v", p), ("v_half", (p + 2) // 2), ("v_min", (p + 4) // 3)):
        for m in (1, p, 3 * p):
            time = simulate(schedules.build(name, lanes=p, micro_batches=m), costs)
            assert max(time.peak_bytes) <= units, name
            assert max(time.peak_saved) <= 2 * units, name
            assert time.step_seconds <= step("1f1b", p, m, Costs(forward=1.0, backward=2.0)).step_seconds, name
    assert step("zb_v", p, 3 * p, costs).span_bubble == pytest.approx(0.0, abs=1e-12)


def test_both_bubbles_are_what_they_say():
    time = step("zb_h2", 4, 12, Costs(forward=1, input_grad=1, weight_grad=1))
    busy = 12 * 3
    assert time.bubble == pytest.approx(1 - busy / time.step_seconds)
    assert time.span_bubble == pytest.approx(1 - busy / max(time.lane_seconds))
    assert time.span_bubble == pytest.approx(0)
    assert time.bubble > 0


@pytest.mark.parametrize("schedule", every_schedule())
def test_every_schedule_takes_the_time_a_second_opinion_gives(schedule):
    if schedule.overlaps:
        schedule = penstock.schedules.Schedule(schedule.lanes, schedule.ways, schedule.num_mbs, schedule.way_of)
    rng = np.random.default_rng(schedule.num_actions)
    costs = {k: rng.uniform(0.5, 2, schedule.num_stages) for k in ("forward", "input_grad", "weight_grad", "update")}
    backward = costs["input_grad"] + costs["weight_grad"]
    table = {
        "F": costs["forward"],
        "I": costs["input_grad"],
        "W": costs["weight_grad"],
        "U": costs["update"],
        "B": backward,
    }
    slow = run_slowly(schedule, lambda kind, stage: table[kind][stage], lag=0.3)
    time = simulate(schedule, Costs(**costs, transfer=0.3))
    spans = {span.action: (span.start, span.end) for span in time if span.to_lane < 0}
    assert spans.keys() == slow.keys()
    for action, moments in slow.items():
        assert spans[action] == pytest.approx(moments)


@given(
    p=st.integers(2, 5),
    m=st.integers(1, 6),
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=4),
    name=st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2"]),
)
def test_values_that_skip_stages_are_waited_for(p, m, pairs, name):
    skips = [(a, b) for a, b in pairs if a < b < p]
    schedule = schedules.build(name, lanes=p, micro_batches=m)
    slow = run_slowly(schedule, lambda kind, stage: 1.0 + stage / 7, lag=5.0, skips=skips)
    seconds = [1.0 + s / 7 for s in range(p)]
    costs = Costs(forward=seconds, backward=seconds, input_grad=seconds, weight_grad=seconds, transfer=5.0)
    time = simulate(schedule, costs, skips=skips)
    assert time.step_seconds == pytest.approx(max(end for _, end in slow.values()))


def test_bandwidth_keeps_a_link_busy():
    """Compute takes no time, so what is left is the link: 4 values of 2 seconds each, one after the other."""
    schedule = schedules.build("gpipe", lanes=2, micro_batches=4)
    costs = Costs(forward=0.0, backward=0.0, output_bytes=20.0)
    time = simulate(schedule, costs, cluster=Cluster(link=Link(bytes_per_second=10.0, latency_seconds=0.5)))
    assert time.step_seconds == pytest.approx(4 * 2.0 + 0.5 + 4 * 2.0 + 0.5)


def test_links_that_are_shared_queue_in_the_order_of_being_ready():
    """Lanes 0→1 and 2→3 share a wire. Each value takes a second of it; the later one waits for the earlier."""
    schedule = schedules.build("chimera", lanes=2, micro_batches=2)  # each lane sends one activation at the same time
    costs = Costs(forward=1.0, backward=1.0, output_bytes=10.0)
    private = simulate(schedule, costs, cluster=Cluster(link=Link(bytes_per_second=10.0)))
    wire = Link(bytes_per_second=10.0, shared_as="wire")
    shared = simulate(schedule, costs, cluster=Cluster(links={(0, 1): wire, (1, 0): wire}))
    sends = sorted((span.start, span.end) for span in shared if span.action.kind is Kind.SEND_F)
    assert sends == [(1.0, 2.0), (2.0, 3.0)]
    assert private.step_seconds < shared.step_seconds


@given(st.integers(2, 5), st.integers(1, 8), st.floats(0.1, 3.0), st.sampled_from(["1f1b", "zb_h1", "gpipe", "zb_v"]))
def test_a_shared_link_is_what_an_event_loop_ordered_by_time_makes_of_it(p, m, seconds, name):
    schedule = schedules.build(name, lanes=p, micro_batches=m)
    wire = Link(bytes_per_second=1.0, shared_as="wire")
    time = simulate(schedule, Costs(output_bytes=seconds), cluster=Cluster(link=wire))
    ends = {span.action: span.end for span in time}
    sends = sorted((s for s in time if s.to_lane >= 0), key=lambda s: s.start)
    for before, after in pairwise(sends):
        assert after.start >= before.end - 1e-9  # one at a time
    free = 0.0
    waiting = [(_ready(span, ends), span) for span in sends]
    for span in sends:  # and always one of those that were ready first
        ready = _ready(span, ends)
        assert span.start == pytest.approx(max(ready, free))
        later = [r for r, other in waiting if other.start > span.start]
        assert all(r >= ready - 1e-9 for r in later)
        free = span.end


def _ready(span, ends):
    action = span.action
    if action.kind is Kind.SEND_F:
        return ends[action._replace(kind=Kind.F)]
    return min(ends[action._replace(kind=kind)] for kind in (Kind.B, Kind.I) if action._replace(kind=kind) in ends)


def test_devices_of_different_speed():
    schedule = schedules.build("gpipe", lanes=2, micro_batches=3)
    time = simulate(schedule, Costs(forward=1.0, backward=2.0), cluster=Cluster(speed=[2.0, 1.0]))
    even = simulate(schedule, Costs(forward=[0.5, 1.0], backward=[1.0, 2.0]))
    assert time.step_seconds == pytest.approx(even.step_seconds)


def test_recompute_costs_a_forward_and_starts_before_the_gradient_is_there():
    schedule = schedules.build("1f1b", lanes=2, micro_batches=1)
    costs = Costs(forward=1.0, backward=2.0, saved_bytes=10.0, input_bytes=1.0)
    time = simulate(schedule, costs, keep="recompute")
    spans = {str(s.action): (s.start, s.end) for s in time}
    assert spans["0RECOMPUTE0"] == (1.0, 2.0)  # lane 1's forward is still running
    assert spans["1RECOMPUTE0"] == (2.0, 3.0)
    assert spans["0B0"] == (5.0, 7.0)
    assert time.peak_bytes == (11.0, 11.0)


def test_recompute_holds_inputs_instead_of_what_the_forward_saves():
    schedule = schedules.build("gpipe", lanes=2, micro_batches=6)
    costs = Costs(saved_bytes=100.0, input_bytes=3.0)
    held = simulate(schedule, costs, keep=["recompute", "hold"])
    assert held.peak_bytes == (6 * 3.0 + 100.0, 600.0)
    assert held.peak_saved == (1, 6)


def test_offload_frees_memory_once_the_copy_is_done_and_fetches_ahead():
    schedule = schedules.build("gpipe", lanes=1, micro_batches=8)
    costs = Costs(forward=1.0, backward=1.0, saved_bytes=4.0)
    time = simulate(schedule, costs, keep="offload", cluster=Cluster(host_link=Link(bytes_per_second=8.0)))
    spans = {str(s.action): (s.start, s.end) for s in time}
    assert spans["0OFFLOAD0"] == (1.0, 1.5)
    assert spans["0FETCH0"][1] <= spans["0B0"][0] + 1e-9
    assert spans["0FETCH1"][0] < spans["0B0"][1]  # while the backward before it runs
    assert max(time.peak_saved) <= 3


def test_memory_over_time_starts_and_ends_at_nothing():
    for name in ("1f1b", "zb_h2", "zb_v", "dualpipe"):
        schedule = schedules.build(name, lanes=4, micro_batches=6)
        for keep in ("hold", "recompute", "offload"):
            costs = Costs(saved_bytes=8.0, pending_bytes=3.0, input_bytes=1.0, transfer=0.1)
            time = simulate(schedule, costs, keep=keep, cluster=Cluster(host_link=Link(bytes_per_second=40.0)))
            for memory in time.memory:
                assert len(memory.seconds)
                assert memory.held_bytes[-1] == pytest.approx(0)
                assert memory.held[-1] == 0
                assert (np.diff(memory.seconds) >= 0).all()
                assert memory.held_bytes.min() >= -1e-9


def test_pending_values_count_from_the_input_gradient_to_the_weight_gradient():
    schedule = schedules.Schedule.of(["0F0 0I0 0F1 0I1 0W0 0W1"])
    time = simulate(schedule, Costs(saved_bytes=10.0, pending_bytes=4.0))
    assert time.memory[0].held_bytes.tolist() == [10.0, 4.0, 14.0, 8.0, 4.0, 0.0]
    assert time.peak_bytes == (14.0,)
    assert time.peak_saved == (1,)


def test_memory_is_counted_in_order_where_nothing_takes_time():
    """The story: copies to the host ended before what they copy was made, and lanes held less than nothing."""
    schedule = schedules.build("gpipe", lanes=1, micro_batches=3)
    for costs in (Costs(forward=0, backward=0, saved_bytes=1), Costs(forward=0, saved_bytes=1), Costs(saved_bytes=1)):
        memory = simulate(schedule, costs, keep="offload").memory[0]
        assert memory.held.min() == 0
        assert memory.held.max() >= 1
        assert memory.held[-1] == 0


def test_what_ends_is_freed_before_what_starts_at_the_same_moment():
    """The story: a fetch that started as a backward ended was counted before what the backward freed."""
    schedule = schedules.Schedule.of(["0F1 2F1 2B1 0F0 2F0 2B0 0I0 0B1 0W0", "1F1 1I1 1F0 1W1 1I0 1W0"])
    costs = Costs(forward=1, input_grad=[1, 1, 2], weight_grad=1, saved_bytes=[1, 4, 2], pending_bytes=0)
    wire = Cluster(host_link=Link(bytes_per_second=1.0, shared_as="h"))
    assert simulate(schedule, costs, keep=["offload", "offload", "hold"], cluster=wire).peak_bytes == (2.0, 4.0)


def test_an_order_that_cannot_run_says_so_whatever_is_kept():
    for keep in ("hold", "recompute", "offload"):
        with pytest.raises(ScheduleError, match="deadlock"):
            simulate(schedules.Schedule.of(["0B0 0F0"]), keep=keep)


def test_arguments_without_effect_are_refused():
    lowered = lower(schedules.build("1f1b", lanes=2, micro_batches=2))
    for ignored in ({"keep": "recompute"}, {"skips": [(0, 1)]}):
        with pytest.raises(UsageError, match="already"):
            simulate(lowered, **ignored)
    for wrong in ("1f1b", None, 3):
        with pytest.raises(UsageError, match="only a schedule"):
            simulate(wrong)
    with pytest.raises(UsageError, match=r"pass a penstock\.Costs"):
        simulate(lowered, {"forward": 1})
    with pytest.raises(UsageError, match=r"pass a penstock\.Cluster"):
        simulate(lowered, cluster="fast")


def test_a_schedule_that_deadlocks_is_refused():
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(schedules.Schedule.of(["0F0 0F1 0B1 0B0", "1F1 1B0 1F0 1B1"]))


def test_a_schedule_that_lacks_actions_is_refused():
    with pytest.raises(ScheduleError, match="verify"):
        simulate(schedules.Schedule.of(["0F0 0B0", "1F0"]))
    with pytest.raises(ScheduleError, match="0B1 or 0W1 is missing"):
        simulate(schedules.Schedule.of(["0F0 0F1 0B0"]))


def test_costs_must_fit_the_schedule():
    with pytest.raises(CostError, match=r"one per stage \(4 stages\); given: forward: 3"):
        simulate(schedules.build("1f1b", lanes=4, micro_batches=4), Costs(forward=[1, 2, 3]))
    with pytest.raises(CostError, match="lanes: 2"):
        simulate(schedules.build("1f1b", lanes=2, micro_batches=4), cluster=Cluster(speed=[1, 2, 3]))
    with pytest.raises(CostError, match=r"do not exist: \[7\]"):
        simulate(schedules.build("1f1b", lanes=2, micro_batches=4), cluster=Cluster(links={(0, 7): Link()}))


def test_a_lowered_schedule_simulates_the_same():
    schedule = schedules.build("zb_v", lanes=4, micro_batches=6)
    costs = Costs(transfer=0.2)
    assert simulate(lower(schedule), costs).step_seconds == simulate(schedule, costs).step_seconds


def test_a_lane_with_nothing_to_do_is_all_bubble():
    schedule = schedules.Schedule(
        (*schedules.build("gpipe", lanes=1, micro_batches=2).lanes, schedules.Lane.of([])), ((0,),), 2
    )
    time = simulate(schedule)
    assert time.lane_bubbles == (0.0, 1.0)
    assert time.bubble == pytest.approx(0.5)
    assert time.peak_saved == (2, 0)


def test_what_the_runtime_adds_counts_once_an_action_whatever_the_speed():
    schedule = schedules.build("gpipe", lanes=2, micro_batches=4)
    costs = Costs(forward=1.0, backward=2.0)
    time = simulate(schedule, costs, cluster=Cluster(speed=2.0, action_seconds=0.25))
    assert time.step_seconds == pytest.approx(5 * (0.5 + 0.25) + 5 * (1.0 + 0.25))
    pairs = schedules.build("dualpipe", lanes=2, micro_batches=6)
    without = simulate(pairs, Costs(overlapped=2.0)).step_seconds
    assert simulate(pairs, Costs(overlapped=2.0), cluster=Cluster(action_seconds=0.5)).step_seconds > without


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "1", True])
def test_what_the_runtime_adds_must_be_a_number(wrong):
    with pytest.raises(CostError, match="action_seconds"):
        Cluster(action_seconds=wrong)
