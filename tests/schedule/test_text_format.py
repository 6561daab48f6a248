"""Text and CSV: round trips, torch's own files, ours in torch, and malformed ones."""

from pathlib import Path

import numpy as np
import pytest

import torch_schedules as torchs
from cases import NAMES, build_or_none, every_schedule
from penstock import schedules, simulate
from penstock.errors import OutputError, ScheduleError
from penstock.schedule.actions import Kind
from penstock.schedules import Schedule, load_csv, verify


@pytest.mark.parametrize("schedule", every_schedule())
def test_a_csv_file_holds_the_whole_schedule(schedule, tmp_path):
    schedule.to_csv(tmp_path / "s.csv")
    assert load_csv(tmp_path / "s.csv") == schedule


@pytest.mark.parametrize("schedule", every_schedule())
def test_text_holds_the_whole_schedule(schedule):
    assert Schedule.of(str(schedule).splitlines()) == schedule


@pytest.mark.parametrize(
    ("kind", "stages_of", "ours"),
    [
        ("ScheduleInterleaved1F1B", torchs.loop(4, 2), "interleaved_1f1b"),
        ("ScheduleDualPipeV", torchs.fold(4), "dualpipe_v"),
        ("ScheduleLoopedBFS", torchs.loop(4, 3), None),  # torch runs the backwards from the last micro-batch
        ("ScheduleZBVZeroBubble", torchs.fold(4), None),  # torch places some weight gradients elsewhere
        ("ScheduleInterleavedZeroBubble", torchs.loop(4, 2), None),
    ],
)
def test_files_written_by_torch_load_and_verify(kind, stages_of, ours, tmp_path):
    theirs = torchs.make(kind, lanes=4, micro_batches=8, stages_of=stages_of)
    theirs._dump_csv(str(tmp_path / "t.csv"), "compute_only")
    loaded = load_csv(tmp_path / "t.csv")
    verify(loaded)
    assert loaded.num_mbs == 8
    assert loaded.num_lanes == 4
    if ours:
        assert loaded == schedules.build(ours, lanes=4, micro_batches=8)


def test_zb_v_is_torchs_but_for_the_weight_gradients(tmp_path):
    theirs = torchs.make("ScheduleZBVZeroBubble", lanes=4, micro_batches=8, stages_of=torchs.fold(4))
    theirs._dump_csv(str(tmp_path / "t.csv"), "compute_only")
    loaded, ours = load_csv(tmp_path / "t.csv"), schedules.build("zb_v", lanes=4, micro_batches=8)
    for lane, own in zip(loaded, ours, strict=True):
        assert [a for a in lane if a.kind is not Kind.W] == [a for a in own if a.kind is not Kind.W]
    assert simulate(loaded).step_seconds == simulate(ours).step_seconds


ONE_WAY = [name for name in NAMES if name not in ("dualpipe", "chimera", "pipedream", "pipedream_2bw")]


@pytest.mark.parametrize("name", ONE_WAY)
@pytest.mark.parametrize(("lanes", "mbs"), [(2, 3), (4, 8)])
def test_our_files_load_in_torch_which_can_lower_them(name, lanes, mbs, tmp_path):
    schedule = schedules.build(name, lanes=lanes, micro_batches=mbs)
    schedule.to_csv(tmp_path / "s.csv")
    theirs = torchs.runtime(schedule, tmp_path / "s.csv")
    for lane, row in theirs.pipeline_order.items():
        flat = [a for action in row for a in (action.sub_actions or (action,))]
        assert " ".join(map(str, flat)) == str(schedule.lanes[lane])
    assert set(theirs.pipeline_order_with_comms) == set(range(lanes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"line 2, cell 2: '1X0' is not an action"),
        ("0F0,0B0,F\n", r"line 1, cell 3: 'F' is not an action"),
        ("0F0,0SEND_F0\n", r"line 1, cell 2: '0SEND_F0' is a transfer"),
        ("0UNSHARD,0F0\n", r"cell 1: '0UNSHARD' belongs to torch's lowered form"),
        ("0F0@x\n", r"line 1, cell 1: '0F0@x' must have a whole number"),
        ("0F0,0B0\n2F0,2B0\n", r"stage 1 has no action, but stage 2 has"),
        ("0F0,0B0,0F5,0B5\n", r"micro-batch 1 has no action, but micro-batch 5 has"),
        ("", r"has no actions"),
        ("\n,,\n", r"has no actions"),
        ('"0F0\n', r"not a CSV file"),
        ("(0F0;0B0\n", r"line 1, cell 1"),
        ("99999999999F0\n", r"out of range"),
        ("0F" + "9" * 5000 + "\n", r"is not an action"),
        ("0F0@" + "9" * 5000 + "\n", r"must have a whole number"),
        ("-1F0\n", r"is not an action"),
        ("0F0.5\n", r"is not an action"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text, message, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as error:
        load_csv(path)
    assert "bad.csv" in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "b.csv").write_bytes(b"0F0,\xff\xfe\n")
    with pytest.raises(ScheduleError, match="not UTF-8"):
        load_csv(tmp_path / "b.csv")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_csv(tmp_path / "none.csv")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_csv(tmp_path)


def test_huge_numbers_allocate_nothing(tmp_path):
    (tmp_path / "h.csv").write_text("16777215F2147483647,0F0\n")
    with pytest.raises(ScheduleError, match="has no action"):
        load_csv(tmp_path / "h.csv")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    schedule = schedules.build("1f1b", lanes=2, micro_batches=2)
    with pytest.raises(OutputError, match="cannot be written"):
        schedule.to_csv(tmp_path / "no" / "such" / "s.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="directory"):
        schedule.to_csv(tmp_path / "folder")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["folder"]


def test_what_is_no_regular_file_is_written_to_and_links_are_followed(tmp_path):
    """The story: a pipe, a device and a link were replaced by a file."""
    schedule = schedules.build("1f1b", lanes=2, micro_batches=2)
    schedule.to_csv("/dev/null")
    assert not Path("/dev/null").is_file()
    (tmp_path / "real.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to("real.csv")
    schedule.to_csv(tmp_path / "link.csv")
    assert (tmp_path / "link.csv").is_symlink()
    assert load_csv(tmp_path / "real.csv") == schedule
    with pytest.raises(OutputError, match="No space left"):
        schedule.to_csv("/dev/full")


def test_a_private_file_stays_private(tmp_path):
    path = tmp_path / "s.csv"
    path.touch(mode=0o600)
    schedules.build("1f1b", lanes=2, micro_batches=2).to_csv(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_small_file_cannot_ask_for_much_memory(tmp_path):
    """The story: a diagonal of 10,000 stages and micro-batches took gigabytes."""
    (tmp_path / "d.csv").write_text("\n".join(f"{i}F{i},{i}B{i}" for i in range(10_000)))
    with pytest.raises(ScheduleError, match="lacks most of its actions"):
        load_csv(tmp_path / "d.csv")
    with pytest.raises(ScheduleError, match="not a file"):
        load_csv("/dev/zero")


def test_odd_files(tmp_path):
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\n")  # a byte order mark, as some editors write
    assert str(load_csv(tmp_path / "b.csv")) == "0F0 0B0"
    for name in (b"x.csv", None, "a\0b"):
        with pytest.raises(ScheduleError):
            load_csv(name)
    with pytest.raises(OutputError):
        schedules.build("1f1b", lanes=1, micro_batches=1).to_csv("a\0b")
    with pytest.raises(ScheduleError, match="one text per lane"):
        Schedule.of("0F0 0B0")


def test_lists_and_numpy_numbers_make_the_same_schedule():
    given = Schedule(["0F0 0B0"], [[np.int64(0)]], np.int64(1), name="x")
    assert given == Schedule.of(["0F0 0B0"])
    assert hash(given) == hash(Schedule.of(["0F0 0B0"]))
    for wrong in ({"ways": [[0.5]]}, {"num_mbs": 1.5}, {"lanes": [5]}, {"versions": [["x"]]}):
        with pytest.raises(ScheduleError):
            Schedule(**({"lanes": ["0F0 0B0"], "ways": [[0]], "num_mbs": 1} | wrong))


def test_idle_cells_are_skipped(tmp_path):
    (tmp_path / "i.csv").write_text("0F0,,0B0\r\n,1F0,1B0\r\n\r\n")
    assert str(load_csv(tmp_path / "i.csv")) == "0F0 0B0\n1F0 1B0"


def test_stages_that_live_on_two_lanes_are_recognised():
    for name in ("dualpipe", "chimera"):
        schedule = build_or_none(name, 4, 7)
        read = Schedule.of(str(schedule).splitlines())
        assert read.ways == schedule.ways
        assert read.way_of == schedule.way_of
