"""Timeline: its figures, its text and its Chrome trace."""

import gzip
import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from penstock import Costs, schedules, simulate
from penstock.errors import OutputError
from penstock.report.bubble_causes import Causes
from penstock.report.units import parse_bytes, parse_seconds, show_bytes, show_seconds
from penstock.schedule.actions import KINDS, Kind


@pytest.fixture(scope="module")
def timeline():
    schedule = schedules.build("zb_h1", lanes=3, micro_batches=4)
    return simulate(schedule, Costs(transfer=0.25, saved_bytes=100, pending_bytes=40))


def test_figures(timeline):
    assert len(timeline) == 3 * 4 * 3 + 2 * 2 * 4
    assert timeline.busy_seconds == (12.0,) * 3
    assert timeline.step_seconds == pytest.approx(max(s.end for s in timeline))
    assert timeline.bubble == pytest.approx(1 - 36 / (3 * timeline.step_seconds))
    assert timeline.lane_bubbles == pytest.approx([1 - 12 / timeline.step_seconds] * 3)
    assert timeline.peak_saved == (3, 2, 1)


def test_text_shows_every_lane_and_both_bubbles_by_name(timeline):
    text = timeline.to_text(width=120, color=False)
    lines = text.splitlines()
    assert [line[:6] for line in lines[:3]] == ["lane 0", "lane 1", "lane 2"]
    assert "F0" in lines[0]
    assert "W3" in lines[2]
    assert all(len(line) == 120 for line in lines[:3])
    assert " % of the makespan" in lines[-1]
    assert "of the longest lane span" in lines[-1]
    assert "\033" not in text


def test_text_is_coloured_on_demand(timeline):
    text = timeline.to_text(width=100, color=True)
    assert "\033[" in text
    plain = re.sub(r"\033\[[0-9;]*m", "", text).splitlines()
    assert all(len(line) == 100 for line in plain[:3])
    assert "input gradient" in text
    letters = set(re.sub(r"[^A-Z]", "", "".join(plain[: timeline.num_lanes])))
    assert letters == {"F", "I", "W"}  # told apart without colours too: the chart had numbers only
    narrow = re.sub(r"\033\[[0-9;]*m", "", timeline.to_text(width=40, color=True)).splitlines()
    assert {len(line) for line in narrow[: timeline.num_lanes]} == {40}


@pytest.mark.parametrize("width", [10, 31, 200, 1000])
def test_text_fits_any_width(timeline, width):
    lines = timeline.to_text(width=width, color=False).splitlines()
    assert {len(line) for line in lines[:3]} == {max(30, width)}


def test_text_of_overlapping_actions_shows_both():
    time = simulate(schedules.Schedule.of(["0F0 (0F1;0B0) 0B1"]), Costs(forward=10, backward=10))
    line = time.to_text(width=80, color=False).splitlines()[0]
    assert all(word in line for word in ("F0", "F1", "B0", "B1"))


def test_chrome_trace(timeline, tmp_path):
    timeline.to_chrome(tmp_path / "t.json")
    text = (tmp_path / "t.json").read_text()
    trace = json.loads(text)
    assert re.search(r'"rank":\s+(\d+)', text)  # what HTA looks for
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 36
    transfers = {phase: [e for e in trace["traceEvents"] if e["ph"] == phase] for phase in "be"}
    assert len(spans) + len(transfers["b"]) == len(timeline)
    assert sorted(e["id2"]["local"] for e in transfers["b"]) == sorted(e["id2"]["local"] for e in transfers["e"])
    first = next(e for e in spans if e["name"] == "0F0")
    assert (first["pid"], first["ts"], first["dur"]) == (0, 0, pytest.approx(1e6))
    assert first["args"] == {"action": "0F0", "stage": 0, "micro-batch": 0}
    assert {e["name"] for e in transfers["b"]} == {"send of an activation", "send of a gradient"}
    arrows = {phase: [e for e in trace["traceEvents"] if e["ph"] == phase] for phase in "sf"}
    assert len(arrows["s"]) == len(arrows["f"]) == 2 * 2 * 4
    starts = {e["id"]: e for e in arrows["s"]}
    for end in arrows["f"]:
        assert end["ts"] > starts[end["id"]]["ts"]
        assert abs(end["pid"] - starts[end["id"]]["pid"]) == 1
    counters = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0]
    assert max(e["args"]["bytes"] for e in counters) <= timeline.peak_bytes[0]
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "lane 0",
        "lane 1",
        "lane 2",
    }


def test_chrome_trace_can_be_packed(timeline, tmp_path):
    timeline.to_chrome(tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceName"] == "zb_h1"


def test_a_trace_that_cannot_be_written_leaves_nothing_behind(timeline, tmp_path):
    with pytest.raises(OutputError):
        timeline.to_chrome(tmp_path / "no" / "t.json")
    assert not list(tmp_path.iterdir())


def test_numbers_for_people():
    assert show_seconds(0) == "0 s"
    assert show_seconds(1e-10) == "0.1 ns"
    assert show_seconds(123456.0) == "123,456 s"
    assert show_bytes(2**60) == "1024 PiB"
    assert [parse_bytes(t) for t in ("12", "1KiB", "2 MB", "1e3", "3g", "1PiB")] == [12, 1024, 2e6, 1000, 3e9, 2**50]
    assert [parse_seconds(t) for t in ("600\N{GREEK SMALL LETTER MU}s", "600µs", "600us")] == [6e-4] * 3
    for wrong in ("x", "1QiB", "", "--3"):
        with pytest.raises(ValueError, match="could not convert"):
            parse_bytes(wrong)


BEGIN = 1.7e6  # a clock that began long ago


@pytest.fixture(scope="module")
def measured(timeline):
    """The same step as a runtime would write it down: neighbours touch, and no send says when it arrived."""
    on_lane = timeline.to_lane < 0
    return replace(
        timeline,
        start=BEGIN + timeline.start,
        end=np.where(on_lane, BEGIN + timeline.end + 0.02, np.nan),
        is_measured=True,
        causes=Causes(1.0, warm_up=0.2, overhead=0.05),
    )


def test_figures_of_a_measured_step(timeline, measured):
    assert measured.step_seconds == pytest.approx(timeline.step_seconds + 0.02)
    # a touch counts once: lane 2 has its actions in a row, lane 0 its forwards
    assert max(measured.busy_seconds) < 12 + 12 * 0.02
    assert measured.bubble < timeline.bubble
    assert measured.peak_saved == timeline.peak_saved
    assert measured.peak_bytes == timeline.peak_bytes
    assert measured.memory[0].held_bytes.tolist() == timeline.memory[0].held_bytes.tolist()


def test_text_of_a_measured_step(timeline, measured):
    lines = measured.to_text(width=120, color=False).splitlines()
    ideal = timeline.to_text(width=120, color=False).splitlines()
    for line, expected in zip(lines[:3], ideal[:3], strict=True):
        assert re.findall(r"[FIW]\d", line) == re.findall(r"[FIW]\d", expected)
        assert len(line) == 120
    assert lines[3].startswith("zb_h1, measured: step 16.02 s")
    assert lines[5] == (
        "of the makespan: warm-up and cool-down 20.0 %, imbalance 0.0 %, transfers 0.0 %, runtime overhead 5.0 %"
    )


def test_text_of_pairs_that_overlap_nearly_shows_both():
    time = simulate(schedules.Schedule.of(["0F0 (0F1;0B0) 0B1"]), Costs(forward=10, backward=10))
    is_backward = time.kind == KINDS.index(Kind.B)
    for shift in (0.4, 3.0, -0.4):
        shifted = replace(time, start=time.start + np.where(is_backward, max(shift, 0.0), max(-shift, 0.0)))
        line = shifted.to_text(width=80, color=False).splitlines()[0]
        assert all(word in line for word in ("F0", "F1", "B0", "B1"))
        assert len(line) == 80


def test_chrome_trace_of_a_measured_step(measured, tmp_path):
    measured.to_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert min(e["ts"] for e in events if "ts" in e) == 0
    marks = [e for e in events if e["ph"] == "n"]
    assert len(marks) == 2 * 2 * 4
    assert not [e for e in events if e["ph"] in "besf"]
    for lane in range(3):  # on one thread no slice juts out of another
        slices = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == lane)
        assert {e["tid"] for e in events if e["ph"] == "X"} == {0}
        assert all(after[0] >= before[1] - 1e-3 for before, after in pairwise(slices))


def test_chrome_trace_of_pairs_that_overlap_nearly_has_them_side_by_side(tmp_path):
    time = simulate(schedules.Schedule.of(["0F0 (0F1;0B0) 0B1"]), Costs(forward=10, backward=10))
    later = np.where(time.kind == KINDS.index(Kind.B), 3.0, 0.0)
    replace(time, start=time.start + later, end=time.end + later).to_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    threads = {e["name"]: e["tid"] for e in events if e["ph"] == "X"}
    assert threads == {"0F0": 0, "0F1": 0, "0B0": 1, "0B1": 0}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"compute", "compute beside"}
