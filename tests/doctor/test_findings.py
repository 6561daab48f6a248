"""Findings: what is worth saying, from counts that are made up here."""

import json

import pytest

from penstock.doctor.doctor_report import Finding, Kind, Report
from penstock.doctor.findings import Observations, make_report
from penstock.doctor.gpu_busy import Busy, count_busy
from penstock.doctor.sightings import LAUNCH_SECONDS, Entry, Phase, Tally
from penstock.doctor.source_lines import Place

LINE, OTHER_LINE = Place("train.py", 3), Place("train.py", 7)


def seen(looked=None, timed=None, *, steps=4, **more):
    entries = {Phase.WARM: {}, Phase.TIMED: timed or {}, Phase.OBSERVED: looked or {}, None: {}}
    step_seconds = {Phase.WARM: [9.0], Phase.TIMED: [0.1] * 2, Phase.OBSERVED: [0.5] * steps}
    return Observations(**{"entries": entries, "step_seconds": step_seconds, "device": "GPU", **more})


def test_costs_are_told_by_the_line_and_the_costliest_comes_first():
    report = make_report(
        seen({
            (Kind.ITEM, LINE): Entry(8, blocked_seconds=0.02, idle_seconds=0.001),
            (Kind.UNPINNED, OTHER_LINE): Entry(4, blocked_seconds=0.01, idle_seconds=0.002, detail="(3,), 12 B"),
        })
    )  # fmt: skip
    first, second = report.findings
    assert (first.kind, first.place, first.count, first.per_step) == (Kind.UNPINNED, "train.py:7", 4, 1.0)
    assert (first.blocked_ms, first.idle_ms, first.detail) == (2.5, 0.5, "(3,), 12 B")
    assert (second.kind, second.per_step, second.advice) == (Kind.ITEM, 2.0, Kind.ITEM.advice)
    assert (report.num_steps, report.step_ms) == (4, pytest.approx(100))


def test_what_a_step_costs_counts_not_in_how_many_it_was_seen():
    """The story: a loader that cost 30 ms came behind a line that cost 8, for fewer steps are timed than looked at."""
    report = make_report(
        seen(
            {(Kind.ITEM, LINE): Entry(40, idle_seconds=0.32)},
            {(Kind.STARVED, OTHER_LINE): Entry(2, 0.06, 0.06)},
            steps=40,
        )
    )
    assert [(f.kind, f.idle_ms) for f in report.findings] == [(Kind.STARVED, 30.0), (Kind.ITEM, 8.0)]


def test_what_torch_reports_is_told_only_where_nothing_else_is_known():
    entries = {(Kind.ITEM, LINE): Entry(1), (Kind.OTHER, LINE): Entry(1), (Kind.OTHER, OTHER_LINE): Entry(1)}
    assert {(f.kind, f.place) for f in make_report(seen(entries)).findings} == {
        (Kind.ITEM, "train.py:3"),
        (Kind.OTHER, "train.py:7"),
    }


@pytest.mark.parametrize(("waited", "is_told"), [(0.019, False), (0.021, True)])
def test_a_data_loader_is_told_above_a_tenth_of_the_steps_that_were_timed(waited, is_told):
    slow = {(Kind.STARVED, LINE): Entry(4, 9.0, 9.0)}  # looking slows it down
    for entry, device in ((Entry(2, blocked_seconds=waited), ""), (Entry(2, 9.0, waited), "GPU")):
        report = make_report(seen(slow, {(Kind.STARVED, LINE): entry}, device=device))
        assert [f.kind for f in report.findings] == [Kind.STARVED] * is_told
        assert [f.detail for f in report.findings] == ["10.5 % of a step"] * is_told


@pytest.mark.parametrize(("count", "words"), [(1, "once in 15 steps"), (2, "twice in 15 steps"), (15, "1 per step")])
def test_what_is_rarer_than_once_a_step_is_told_by_the_steps(count, words):
    """It said "0.0667 a step" of what happened once in 15 steps."""
    report = make_report(seen({(Kind.ITEM, LINE): Entry(count)}, steps=15))
    assert f"reads a value; {words}" in report.to_text(width=300)


def test_the_time_of_a_step_is_the_median_of_steps_that_nobody_watched():
    """A step of 0.2 ms was said to take 38 ms: one slow step was in the mean of three."""
    seconds = {Phase.WARM: [9.0], Phase.TIMED: [0.114, 2e-4, 2e-4], Phase.OBSERVED: [0.5] * 4}
    report = make_report(seen(device="", step_seconds=seconds))
    assert report.step_ms == pytest.approx(0.2)
    assert "includes the time to observe it" not in report.to_text(width=300)
    report = make_report(seen(device="", step_seconds=seconds | {Phase.TIMED: []}))
    assert "includes the time to observe it" in report.to_text(width=300)


def test_a_host_that_runs_ahead_does_not_make_the_gpu_s_steps_short():
    """The story: waiting 5 ms for data beside 1 ms of asking for work was called starving, of a GPU that was busy."""
    loader = {(Kind.STARVED, LINE): Entry(2, 0.15, 0.15)}
    report = make_report(seen(None, loader, busy=Busy(2.0, 1.9, 100)))
    assert report.step_ms == pytest.approx(1000)
    assert report.findings == ()


def busy_report(busy_seconds, looked=None, timed=None, short=1.0):
    busy = Busy(0.2, busy_seconds, 1000, short * (0.2 - busy_seconds))
    return make_report(seen(looked, timed, busy=busy, step_place=OTHER_LINE))


def launch_bound(*given, **more):
    return [finding for finding in busy_report(*given, **more).findings if finding.kind is Kind.LAUNCHES]


def test_steps_are_launch_bound_where_idle_time_has_no_other_cause():
    assert not launch_bound(0.15)
    (finding,) = launch_bound(0.1)
    assert finding.idle_ms == pytest.approx(50)
    assert finding.place == "train.py:7"
    assert finding.detail == (
        "in a step of 100 ms, the GPU works for 50 ms, in 500 kernels of 100 µs, and waits 50 ms in the gaps between"
        " them"
    )
    assert "; 1 per step; the GPU is idle for about 50 ms per step" in busy_report(0.1).to_text(width=200)
    # 4 steps that were looked at, with 30 ms each; 2 that were timed, with 30 ms each
    assert not launch_bound(0.1, {(Kind.ITEM, LINE): Entry(4, idle_seconds=0.12)})
    assert not launch_bound(0.1, None, {(Kind.STARVED, LINE): Entry(2, 0.06, 0.06)})
    assert not launch_bound(0.1, short=0.1)  # long gaps: the host was doing something else


def test_a_run_that_ends_before_a_step_was_timed():
    steps = {Phase.WARM: [], Phase.TIMED: [], Phase.OBSERVED: [0.1]}
    assert make_report(seen(step_seconds=steps, busy=Busy(0.2, 0.1, 5))).findings == ()


def test_what_nothing_explains_is_said():
    def notes(idle, short):
        return " ".join(busy_report(0.1, {(Kind.ITEM, LINE): Entry(4, 0.0, idle)}, short=short).notes)

    assert "For 45 ms of a step the GPU is idle, and no finding below explains it" in notes(0.02, 0.1)
    assert notes(0.0, 1.0) == ""  # launches explain it
    assert notes(0.12, 0.0) == ""  # the line that waits does


def test_how_busy_the_gpu_is_is_told():
    report = make_report(seen(busy=Busy(0.2, 0.15, 10)))
    assert report.idle_share == pytest.approx(0.25)
    assert "the GPU is idle for 25.0 %" in report.to_text(width=300)


def test_without_a_gpu_nothing_costs_anything():
    entries = {(Kind.ITEM, LINE): Entry(4, 0.5, 0.5)}
    report = make_report(seen(entries, device=""))
    assert [(f.count, f.blocked_ms, f.idle_ms) for f in report.findings] == [(4, 0, 0)]
    assert "There is no GPU" in report.to_text(width=300)
    assert "ms in it" not in report.to_text(width=300)


def test_short_runs_are_told_from_what_there_is():
    entries = {phase: {} for phase in (*Phase, None)}
    entries[Phase.WARM] = {(Kind.ITEM, LINE): Entry(2)}
    entries[None] = {(Kind.PRINT, LINE): Entry(1)}
    warm = make_report(Observations(entries, {Phase.WARM: [0.1, 0.1], Phase.OBSERVED: [], Phase.TIMED: []}, "GPU"))
    assert [(f.kind, f.per_step) for f in warm.findings] == [(Kind.ITEM, 1.0)]
    assert "only warm-up steps" in warm.to_text(width=300)
    none = make_report(Observations(entries, {phase: [] for phase in Phase}, "GPU"))
    assert [(f.kind, f.count) for f in none.findings] == [(Kind.PRINT, 1)]
    assert none.step_ms == 0
    assert "No step ended" in none.to_text(width=300)


class Reduced:
    def __init__(self, told):
        self.told = told

    def try_out(self):
        return self.told


@pytest.mark.parametrize(("told", "detail"), [(None, None), ("", "sum"), ("takes long", "sum: takes long")])
def test_reductions_are_told_unless_they_gain_nothing(told, detail):
    entries = {(Kind.REDUCTION, LINE): Entry(1, detail="sum", reduction=Reduced(told))}
    assert [f.detail for f in make_report(seen(entries)).findings] == [d for d in [detail] if d is not None]
    assert [f.detail for f in make_report(seen(entries, device="")).findings] == ["sum"]  # not tried on a CPU


# ---- the report


FINDING = Finding(Kind.ITEM, "train.py:3", "loss.item()", 8, 2.0, 3.0, 1.0, "Do not.", "scalar", "mine.py:1")


def test_text_has_the_line_the_count_and_the_costs():
    text = Report((FINDING,), 4, 100.0, None, "GPU").to_text(width=200, color=False)
    assert text.splitlines() == [
        "1 finding in 4 steps on GPU, a step takes 100 ms",
        "",
        "train.py:3: reads a value; 2 per step; the host spends 3 ms in it and the GPU is idle for about 1 ms per step",
        "    loss.item()",
        "    scalar; called from mine.py:1",
        "    Do not.",
    ]
    assert "\033[1m" in Report((FINDING,), 4, 100.0, None, "GPU").to_text(color=True)
    assert Report((), 1, 0.0, None, "GPU").to_text(width=300) == "Nothing found in 1 step on GPU"


def test_code_cannot_steer_the_terminal():
    hostile = Finding(Kind.ITEM, "a\x1b[31m.py:3", "x = '\x1b[31m'", 1, 1.0, 0.0, 0.0, "")
    assert "\x1b" not in Report((hostile,), 1, 0.0, None, "").to_text(color=False)


def test_json_has_all_of_it():
    data = json.loads(Report((FINDING,), 4, 100.0, 0.5, "GPU", ("a note",)).to_json())
    assert data["findings"] == [
        {
            "kind": "item", "place": "train.py:3", "code": "loss.item()", "count": 8, "per_step": 2.0,
            "blocked_ms": 3.0, "idle_ms": 1.0, "advice": "Do not.", "detail": "scalar", "called_from": "mine.py:1",
        }
    ]  # fmt: skip
    assert (data["steps"], data["step_ms"], data["idle_share"], data["device"]) == (4, 100.0, 0.5, "GPU")
    assert data["notes"] == ["a note"]


# ---- counting


def test_idleness_is_what_lies_between_a_wait_and_the_next_launch():
    tally = Tally()
    tally.launched(1.0)
    tally.add(Kind.ITEM, LINE)
    tally.drained(Kind.ITEM, LINE, 2.0)
    tally.launched(2.5)
    tally.launched(9.0)  # the device has had something to do since
    (entry,) = tally.entries(None).values()
    assert (entry.count, entry.idle_seconds) == (1, 0.5 + LAUNCH_SECONDS)


def test_a_wait_at_the_end_of_a_step_costs_nothing_that_is_seen():
    """The story: the next launch was seen three steps later, after those that are only timed."""
    tally = Tally()
    tally.add(Kind.ITEM, LINE)
    tally.drained(Kind.ITEM, LINE, 2.0)
    tally.commit(Phase.OBSERVED)
    tally.launched(100.0)
    assert not tally.entries(None)
    assert [entry.idle_seconds for entry in tally.entries(Phase.OBSERVED).values()] == [0]


def test_steps_add_up():
    tally = Tally()
    for _ in range(2):
        tally.add(Kind.ITEM, LINE, blocked=1.0, detail="first")
        tally.add(Kind.ITEM, LINE, blocked=1.0, detail="second")
        tally.commit(Phase.OBSERVED)
    assert tally.entries(Phase.OBSERVED) == {(Kind.ITEM, LINE): Entry(4, 4.0, 0.0, "first")}
    tally.clear()
    assert not tally.entries(Phase.OBSERVED)


def test_kernels_of_several_streams_count_once():
    assert count_busy([]) is None
    assert count_busy([(3.0, 4.0), (1.0, 2.0)]) == Busy(3.0, 2.0, 2)
    assert count_busy([(0.0, 1.0), (1.0001, 2.0)]).short_seconds == pytest.approx(1e-4)
    assert count_busy([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0)]) == Busy(5.0, 5.0, 3)
