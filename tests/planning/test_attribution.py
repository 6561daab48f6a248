"""Causes: a step with one trouble has that trouble as its cause, and causes always add up to the bubble."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import every_schedule
from penstock import Cluster, Costs, Link, schedules, simulate
from penstock.errors import UsageError
from penstock.planning.attribution import find_causes
from penstock.report.bubble_causes import CAUSES
from penstock.report.timeline import Timeline
from penstock.schedule.actions import KINDS, Kind
from penstock.schedule.lower import lower
from penstock.schedule.rules import RULES, Where

SECONDS = {Kind.F: 1.0, Kind.B: 2.0, Kind.I: 1.0, Kind.W: 1.0, Kind.U: 0.5, Kind.RECOMPUTE: 1.0}
NAMES = ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe", "dualpipe_v", "chimera", "pipedream"]
EXACT = 1e-6  # seconds: what is left of a float at BEGIN
BEGIN = 1e5  # clocks do not start at zero


def lowered_of(name, lanes=4, micro_batches=8, **options):
    return lower(schedules.build(name, lanes=lanes, micro_batches=micro_batches), **options)


def nothing(at):
    return 0.0


def measure(lowered, *, seconds=None, lag=nothing, gap=nothing, copy=nothing):
    """Run a lowered schedule as a runtime would, one row after the other, and write down what happened.

    For a row's position: `seconds` is what its compute takes, `lag` how long its value is on its way, `gap` how long
    the lane dawdles before it, `copy` what an offload or fetch takes. A receive blocks its lane where it stands.
    """
    rows, needs = lowered.rows, lowered.flow.needs
    seconds = seconds or (lambda at: SECONDS[KINDS[rows.kind[at]]])
    spans, seen, free = {}, {}, [BEGIN] * lowered.schedule.num_lanes
    cursor = rows.starts[:-1].tolist()
    moved = True
    while moved:
        moved = False
        for lane, last in enumerate(rows.starts[1:].tolist()):
            while (at := cursor[lane]) < last and all(int(need) in seen for need in needs[at] if need >= 0):
                ready = max((seen[int(need)] for need in needs[at] if need >= 0), default=BEGIN)
                where = RULES[KINDS[rows.kind[at]]].where
                if where is Where.LANE:
                    start = max(ready, free[lane]) + gap(at)
                    free[lane] = end = start + seconds(at)
                elif where is Where.NOTHING:
                    start, end = free[lane], max(ready, free[lane])
                    free[lane] = end
                else:
                    start = max(free[lane], ready if where is Where.HOST_LINK else BEGIN)
                    end = start + (lag if where is Where.LINK else copy)(at)
                spans[at], seen[at], cursor[lane], moved = (start, end), end, at + 1, True
    assert len(spans) == len(rows)
    return as_timeline(lowered, spans)


def as_timeline(lowered, spans):
    place = np.array(sorted(spans), dtype=np.int32)
    start, end = np.array([spans[at] for at in place.tolist()]).T
    rows, plan = lowered.rows, lowered.schedule
    is_send = np.isin(rows.kind[place], [KINDS.index(Kind.SEND_F), KINDS.index(Kind.SEND_B)])
    to_lane = np.where(is_send, plan.home_table[rows.peer[place], plan.way_table[rows.mb[place]]], -1)
    none = np.zeros(plan.num_stages)
    columns = {name: getattr(rows, name)[place] for name in ("kind", "stage", "mb", "lane")}
    return Timeline(
        plan.name,
        plan.num_lanes,
        **columns,
        to_lane=to_lane.astype(np.int32),
        start=start,
        end=end,
        saved_bytes=none,
        pending_bytes=none,
        input_bytes=none,
        place=place,
        is_measured=True,
    )


def seconds_of(causes):
    """Return the causes in seconds of the step."""
    return {cause.field: getattr(causes, cause.field) * causes.step_seconds for cause in CAUSES}


def check_sums(causes, timeline):
    assert causes.bubble == pytest.approx(timeline.bubble, abs=1e-9)
    assert [lane.bubble for lane in causes.per_lane] == pytest.approx(timeline.lane_bubbles, abs=1e-9)
    for part in (causes, *causes.per_lane):
        assert min(getattr(part, cause.field) for cause in CAUSES) >= 0
    for cause in CAUSES:
        mean = np.mean([getattr(lane, cause.field) for lane in causes.per_lane])
        assert getattr(causes, cause.field) == pytest.approx(mean)


def only(causes, *fields):
    """Are these the only causes?"""
    return {name for name, seconds in seconds_of(causes).items() if seconds > EXACT} == set(fields)


@pytest.mark.parametrize("name", NAMES)
def test_an_ideal_step_has_nothing_but_warm_up(name):
    lowered = lowered_of(name)
    step = measure(lowered)
    causes = find_causes(step, lowered)
    assert only(causes, "warm_up")
    check_sums(causes, step)


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_stage_is_imbalance(name):
    lowered = lowered_of(name)
    rows = lowered.rows
    step = measure(lowered, seconds=lambda at: SECONDS[KINDS[rows.kind[at]]] * (2 if rows.stage[at] == 1 else 1))
    causes = find_causes(step, lowered)
    assert only(causes, "warm_up", "imbalance")
    assert causes.imbalance > 0.05
    check_sums(causes, step)


def test_a_slow_device_leaves_its_own_lane_without_imbalance():
    lowered = lowered_of("1f1b")
    rows = lowered.rows
    step = measure(lowered, seconds=lambda at: SECONDS[KINDS[rows.kind[at]]] * (2 if rows.lane[at] == 2 else 1))
    shares = [lane.imbalance for lane in find_causes(step, lowered).per_lane]
    assert shares[2] == 0
    assert min(shares[:2] + shares[3:]) > 0.2


def test_micro_batches_of_different_length_are_imbalance():
    lowered = lowered_of("1f1b")
    rows = lowered.rows
    step = measure(lowered, seconds=lambda at: SECONDS[KINDS[rows.kind[at]]] * (1 + rows.mb[at] % 2))
    assert only(find_causes(step, lowered), "warm_up", "imbalance")


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_link_is_transfers(name):
    lowered = lowered_of(name)
    ideal = seconds_of(find_causes(measure(lowered), lowered))
    step = measure(lowered, lag=lambda at: 0.7)
    causes = find_causes(step, lowered)
    assert only(causes, "warm_up", "transfers")
    assert seconds_of(causes)["warm_up"] == pytest.approx(ideal["warm_up"], abs=EXACT)
    assert sum(lane.stood_ready for lane in causes.per_lane) == pytest.approx(0, abs=1e-9)
    assert causes.waited_for_transfers > 0
    check_sums(causes, step)


def test_slow_copies_to_and_from_the_host_are_transfers():
    lowered = lowered_of("1f1b", keep="offload")
    ideal = measure(lowered)
    assert only(find_causes(ideal, lowered), "warm_up")
    step = measure(lowered, copy=lambda at: 3.0)
    causes = find_causes(step, lowered)
    assert only(causes, "warm_up", "transfers")
    check_sums(causes, step)


def test_recompute_is_compute():
    lowered = lowered_of("1f1b", keep=["recompute", "hold", "hold", "recompute"])
    step = measure(lowered, lag=lambda at: 0.1)
    causes = find_causes(step, lowered)
    assert causes.overhead == pytest.approx(0, abs=1e-9)
    check_sums(causes, step)


@pytest.mark.parametrize("name", NAMES)
def test_dawdling_is_overhead(name):
    lowered = lowered_of(name)
    ideal = seconds_of(find_causes(measure(lowered), lowered))
    step = measure(lowered, gap=lambda at: 0.2)
    causes = find_causes(step, lowered)
    assert only(causes, "warm_up", "overhead")
    assert seconds_of(causes)["warm_up"] == pytest.approx(ideal["warm_up"], abs=EXACT)
    assert seconds_of(causes)["overhead"] == pytest.approx(step.step_seconds - simulated_seconds(lowered), abs=EXACT)
    check_sums(causes, step)


def simulated_seconds(lowered):
    costs = Costs(forward=1.0, backward=2.0, input_grad=1.0, weight_grad=1.0, update=0.5)
    return simulate(lowered, costs).step_seconds


def test_signs_say_on_which_lane_to_look():
    lowered = lowered_of("1f1b")
    rows = lowered.rows
    step = measure(lowered, gap=lambda at: 0.2 if rows.lane[at] == 2 else 0.0)
    stood = [lane.stood_ready * step.step_seconds for lane in find_causes(step, lowered).per_lane]
    assert stood == pytest.approx([0, 0, 0.2 * 16, 0], abs=EXACT)
    step = measure(lowered, lag=lambda at: 0.5 if rows.lane[at] == 0 else 0.0)
    waited = [lane.waited_for_transfers for lane in find_causes(step, lowered).per_lane]
    assert waited[1] > 0
    assert waited[0] == waited[2] == waited[3] == 0


def test_a_value_that_waits_to_be_sent_is_overhead_of_the_sender():
    """Sends are issued a second late: nothing was on its way, and nothing was wrong with the link."""
    lowered = lowered_of("1f1b")
    step = measure(lowered, lag=lambda at: 1.25)
    is_send = step.to_lane >= 0
    late = replace(step, start=np.where(is_send, step.start + 1.0, step.start))
    causes, on_time = (seconds_of(find_causes(timeline, lowered)) for timeline in (late, step))
    assert 0 < causes["transfers"] < on_time["transfers"] / 2
    assert causes["overhead"] == pytest.approx(on_time["transfers"] - causes["transfers"], abs=EXACT)


def test_a_value_that_queues_behind_another_on_its_channel_is_on_its_way():
    lowered = lowered_of("gpipe", lanes=2, micro_batches=4)
    wire = Cluster(link=Link(bytes_per_second=1.0))
    step = replace(simulate(lowered, Costs(output_bytes=3.0), cluster=wire), is_measured=True)
    assert only(find_causes(step, lowered), "warm_up", "transfers")


def test_sends_whose_end_is_not_known_are_there_when_the_wait_for_them_ends():
    lowered = lowered_of("1f1b")
    step = measure(lowered, lag=lambda at: 0.7)
    unknown = replace(step, end=np.where(step.to_lane >= 0, np.nan, step.end))
    causes = find_causes(unknown, lowered)
    assert seconds_of(causes) == pytest.approx(seconds_of(find_causes(step, lowered)), abs=EXACT)


def test_without_spans_of_transfers_only_compute_is_looked_at():
    lowered = lowered_of("1f1b")
    step = measure(lowered, lag=lambda at: 0.7)
    bare = pick(step, np.flatnonzero(step.kind <= KINDS.index(Kind.U)))
    causes = find_causes(bare, lowered)
    assert only(causes, "warm_up", "overhead")
    check_sums(causes, bare)


def pick(timeline, at):
    columns = ("kind", "stage", "mb", "lane", "to_lane", "start", "end", "place")
    return replace(timeline, **{name: getattr(timeline, name)[at] for name in columns})


@pytest.mark.parametrize("schedule", every_schedule())
def test_a_simulated_step_has_no_overhead(schedule):
    rng = np.random.default_rng(schedule.num_actions)
    costs = {k: rng.uniform(0.5, 2, schedule.num_stages) for k in ("forward", "input_grad", "weight_grad", "update")}
    costs |= {"overlapped": rng.uniform(1, 4, schedule.num_stages), "saved_bytes": 2.0, "output_bytes": 1.0}
    wire = Link(latency_seconds=0.1, bytes_per_second=4.0, shared_as="wire")
    cluster = Cluster(link=wire, host_link=Link(bytes_per_second=3.0), speed=rng.uniform(0.5, 2, schedule.num_lanes))
    lowered = lower(schedule, keep=[("hold", "recompute", "offload")[s % 3] for s in range(schedule.num_stages)])
    step = simulate(lowered, Costs(**costs, transfer=0.3), cluster=cluster)
    causes = find_causes(step, lowered)
    assert causes.overhead * step.step_seconds == pytest.approx(0, abs=EXACT)
    check_sums(causes, step)


@given(
    name=st.sampled_from(NAMES),
    lanes=st.sampled_from([2, 4]),
    micro_batches=st.sampled_from([2, 4, 6]),
    jitter=st.floats(0, 2),
    lag=st.floats(0, 3),
    gap=st.floats(0, 1),
    keep=st.sampled_from(["hold", "recompute", "offload"]),
    noise=st.floats(0, 0.3),
    seed=st.integers(0, 100),
)
def test_causes_of_any_step_add_up_and_none_is_negative(
    name, lanes, micro_batches, jitter, lag, gap, keep, noise, seed
):
    lowered = lowered_of(name, lanes, micro_batches, keep=keep)
    chance = np.random.default_rng(seed).uniform(0, 1, (3, len(lowered.rows)))
    step = measure(
        lowered,
        seconds=lambda at: 1 + jitter * chance[0, at],
        lag=lambda at: lag * chance[1, at],
        gap=lambda at: gap * chance[2, at],
        copy=lambda at: lag * chance[1, at],
    )
    causes = find_causes(step, lowered)
    check_sums(causes, step)
    if not gap:
        assert causes.overhead * step.step_seconds == pytest.approx(0, abs=EXACT)
    if not lag:
        assert causes.transfers * step.step_seconds == pytest.approx(0, abs=EXACT)
    # clocks that disagree from lane to lane, and ends that are off: neighbours overlap, values are used before made
    skew, longer = noise * chance[0, :lanes][step.lane], noise * chance[1]
    check_sums(
        find_causes(shaken := replace(step, start=step.start + skew, end=step.end + skew + longer), lowered), shaken
    )


@given(
    name=st.sampled_from(NAMES), more=st.floats(0.01, 2), cause=st.sampled_from(["lag", "gap"]), seed=st.integers(0, 50)
)
def test_the_cause_that_grows_is_the_one_that_was_made_worse(name, more, cause, seed):
    lowered = lowered_of(name, 4, 4)
    chance = np.random.default_rng(seed).uniform(0.1, 1, (3, len(lowered.rows)))
    size = {"lag": 0.3, "gap": 0.1}

    def run(size):
        return seconds_of(
            find_causes(
                measure(
                    lowered,
                    seconds=lambda at: 1 + 0.2 * chance[0, at],
                    lag=lambda at: size["lag"] * chance[1, at],
                    gap=lambda at: size["gap"] * chance[2, at],
                ),
                lowered,
            )
        )

    before, after = run(size), run(size | {cause: size[cause] + more})
    grown = {"lag": "transfers", "gap": "overhead"}[cause]
    assert after[grown] > before[grown]
    for other in {"warm_up", "imbalance", "transfers"} - {grown}:
        assert after[other] == pytest.approx(before[other], abs=EXACT)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_pairs_that_overlap_count_once_however_they_were_run(name):
    """Run one after the other, at the same time, or a bit of both: the bubble is that of their union."""
    lowered = lowered_of(name)
    assert lowered.schedule.overlaps
    apart = measure(lowered)
    together = simulate(lowered, Costs(forward=1.0, backward=2.0, overlapped=2.0))
    for step in (apart, together):
        causes = find_causes(replace(step, is_measured=True), lowered)
        assert only(causes, "warm_up")
        check_sums(causes, step)
    is_forward = together.kind == KINDS.index(Kind.F)
    for late, early in ((0.3, 0.0), (0.0, 0.3), (0.2, 0.1)):
        shifted = replace(
            together,
            start=together.start + np.where(is_forward, 0.0, late),
            end=together.end - np.where(is_forward, early, 0.0),
            is_measured=True,
        )
        causes = find_causes(shifted, lowered)
        assert only(causes, "warm_up", "overhead")
        check_sums(causes, shifted)


def test_a_timeline_of_another_schedule_is_refused():
    lowered = lowered_of("1f1b")
    step = measure(lowered)
    with pytest.raises(UsageError, match="another schedule"):
        find_causes(step, lowered_of("gpipe"))
    with pytest.raises(UsageError, match="places outside the schedule"):
        find_causes(step, lowered_of("1f1b", 4, 4))
    with pytest.raises(UsageError, match="needs `place`"):
        find_causes(replace(step, place=step.place[:0]), lowered)
    with pytest.raises(UsageError, match="each action may run once"):
        find_causes(pick(step, np.repeat(np.arange(len(step)), 2)), lowered)
    with pytest.raises(UsageError, match="missing: 1, such as 0F0"):
        find_causes(pick(step, np.arange(1, len(step))), lowered)


def test_a_step_of_no_seconds_has_no_causes():
    lowered = lowered_of("1f1b")
    assert find_causes(measure(lowered, seconds=nothing), lowered).bubble == 0


def test_causes_as_text():
    lowered = lowered_of("1f1b")
    causes = find_causes(measure(lowered, gap=lambda at: 0.2, lag=lambda at: 0.1), lowered)
    lines = causes.to_text().splitlines()
    assert lines[0] == "bubble 38.5 % of 4 lanes × 39 s"
    assert [line.split("  ")[1] for line in lines[1:5]] == [cause.name for cause in CAUSES]
    assert len(lines) == 6 + 4
