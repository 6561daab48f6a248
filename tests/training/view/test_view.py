"""What one sees of a training: a picture that fits its terminal, plain lines elsewhere, and a summary."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.nn.functional import mse_loss

import penstock
from penstock.training.callbacks.callback import Reading, Summary
from penstock.training.view.view import View
from penstock.training.view.view_figures import Pace, Sparkline
from penstock.training.view.view_lines import fault_line, summary_lines
from penstock.training.view.view_picture import Picture
from penstock.training.view.view_screen import Outlet, Screen
from training_runs import StopAt, loader, make

ESCAPE = re.compile(r"\033\[[\d;?]*\w")
SHOW_CURSOR, HIDE_CURSOR = "\033[?25h", "\033[?25l"


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self):
        return True

    @property
    def plain(self):
        return ESCAPE.sub("", self.getvalue())


@pytest.fixture(autouse=True)
def size(monkeypatch):
    """A terminal of a size that tests set; without what the one of the tests says."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def set_size(width, height):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", str(height))

    set_size(120, 40)
    return set_size


def timeline(lanes=2, **costs):
    schedule = penstock.schedules.build("1f1b", lanes=lanes, micro_batches=8)
    return penstock.simulate(schedule, penstock.Costs(**({"forward": 1.0, "backward": 2.0} | costs)))


def reading(step=1, *, steps=10, lanes=2, loss=2.5, tokens=640, seconds=0.1, line=None):
    held = tuple(2**20 * (lane + 1) for lane in range(lanes))
    return Reading(step, steps, 0, loss, 1.0, (0.1,), seconds, 8, tokens, line, held)


def pretended(folder, lanes=(0, 1), device="cpu", **more):
    """Return what a view asks of a trainer, without one."""
    schedule = penstock.schedules.build("1f1b", lanes=2, micro_batches=4)
    given = {"is_first": True, "step": 0, "reading": None, "options": SimpleNamespace(steps=10)} | more
    folder = SimpleNamespace(path=Path(folder))
    plan = SimpleNamespace(source="")
    pipe = SimpleNamespace(schedule=schedule, lanes=lanes, devices=[torch.device(device)] * 2, plan=plan)
    return SimpleNamespace(pipe=pipe, folder=folder, **given)


def fit(folder, view, *callbacks, **asked):
    trainer, pipe, _ = make(folder, callbacks=[view, *callbacks], **asked)
    with pipe:
        return trainer.fit()


# ---- the picture


def drawn(picture, width, height, **options):
    console = Console(file=Terminal(), width=width, height=height, force_terminal=True)
    console.print(picture.draw(width, height, **options))
    return ESCAPE.sub("", console.file.getvalue()).splitlines()


def test_the_picture_has_all_that_one_wants_to_see():
    picture = Picture(10)
    for step in range(1, 5):
        picture.add(reading(step, loss=5.0 - step, line=timeline() if step == 1 else picture.reading.timeline))
    picture.validation = 1.25
    text = "\n".join(drawn(picture, 120, 40))
    for words in (
        "loss 1.000 █▆▃▁", "6,400 tokens/s", "step 100 ms", "bubble ", "validation 1.250", "memory held   lane 0 1 MiB",
        "lane 1 2 MiB", "lanes in step 1", "F  forward", "4/10 steps", "to go 0:00:01",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("lanes", [1, 2, 4, 16, 70])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (120, 40), (70, 20), (60, 20), (40, 10), (60, 6), (45, 4)])
def test_the_picture_fits_its_terminal(width, height, lanes):
    picture = Picture(1_000_000)
    assert len(drawn(picture, width, height)) <= height - 1
    picture.add(reading(999_999, steps=1_000_000, lanes=lanes, loss=1234.5, line=timeline(lanes)))
    picture.validation = 1234.5
    lines = drawn(picture, width, height)
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= width
    assert "999999/1000000 steps" in lines[-1]
    assert lines[0].startswith("loss 1234.500")
    if height >= 20:
        assert any(line.startswith(f"lane {min(lanes, 4) - 1}") for line in lines)
        if lanes > 64:
            assert any("more lanes)" in line for line in lines)


def test_a_loss_that_is_not_a_number_is_shown_as_it_is():
    picture = Picture(10)
    for step, loss in enumerate((2.0, float("nan"), 1.0, float("inf")), 1):
        picture.add(reading(step, loss=loss))
    assert "loss inf █▁" in drawn(picture, 100, 30)[0]


def test_a_million_losses_are_a_few_bars():
    spark = Sparkline(16)
    for number in range(100_001):
        spark.add(float(number))
    assert 8 <= len(str(spark)) <= 16
    assert list(str(spark)) == sorted(str(spark))
    assert (str(spark)[0], str(spark)[-1]) == ("▁", "█")


def test_the_pace_starts_anew_when_a_training_is_rewound():
    pace = Pace([reading(step, seconds=1.0) for step in (1, 2, 3)])
    pace.add(reading(2, seconds=0.5, tokens=None))
    assert (pace.step_seconds, pace.seconds_to_go, pace.speed_text) == (0.5, 4.0, "16 samples/s")


# ---- a training in a terminal and elsewhere


def test_a_training_in_a_terminal(tmp_path):
    terminal = Terminal()
    asked = {"validation": loader(16), "validate_every": 3, "checkpoint_every": 4, "record_every": 2, "log_every": 2}
    fit(tmp_path / "run", View(file=terminal), steps=6, **asked)
    text = terminal.plain
    for words in (
        "training: 1f1b, 2 lanes, 4 micro-batches, 6 steps", "the first step is running", "/6 steps", "to go",
        "samples/s", "bubble", "lanes in step", "step 3: validation loss", "step 4: checkpoint", "Done: 6 of 6 steps",
        "checkpoint-000006", "step-000006.html",
    ):  # fmt: skip
        assert words in text, words
    assert "To continue" not in text
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)
    assert sys.stdout is not terminal


@pytest.mark.parametrize("why", ["no terminal", "NO_COLOR", "quiet", "dumb"])
def test_plain_lines(why, tmp_path, monkeypatch):
    if why in ("NO_COLOR", "dumb"):
        monkeypatch.setenv(*{"NO_COLOR": ("NO_COLOR", "1"), "dumb": ("TERM", "dumb")}[why])
    file = io.StringIO() if why == "no terminal" else Terminal()
    fit(tmp_path, View(file=file, quiet=why == "quiet"), StopAt(4), steps=600, log_every=2, validation=loader(16))
    text = file.getvalue()
    assert HIDE_CURSOR not in text
    assert "\r" not in text
    lines = [line for line in ESCAPE.sub("", text).splitlines() if line.startswith("step ")]
    pattern = (
        r"step +(\d+) of 600: loss [\d.]+, [\d,.]+ samples/s,( bubble [\d.]+ %,)? [\d.]+ m?s per step, "
        r"at most .* held per lane"
    )
    assert [int(re.fullmatch(pattern, line)[1]) for line in lines[:3]] == [1, 2, 4]
    assert "Stopped by a callback: 4 of 600 steps" in text
    assert f"To continue: run it again with the same folder, {tmp_path}" in text


def test_a_training_that_resumes_says_so_and_how_to_go_on(tmp_path):
    fit(tmp_path, View(file=io.StringIO()), StopAt(2), steps=6)
    file = io.StringIO()
    fit(tmp_path, View(file=file, again="penstock train this.toml"), StopAt(4), steps=6)
    assert "continues from the checkpoint of step 2" in file.getvalue()
    assert "4 of 6 steps, 2 of them before" in file.getvalue()
    assert file.getvalue().endswith("To continue: penstock train this.toml\n")


def test_others_than_the_first_process_show_nothing(tmp_path):
    file, trainer = Terminal(), pretended(tmp_path, is_first=False)
    view = View(file=file)
    view.on_train_begin(trainer)
    view.on_step_end(trainer, reading())
    view.on_fault(trainer, {"kind": "error", "step": 1, "message": "x"})
    view.on_train_end(trainer, Summary("done", 1, 1, 1.0, None, 1.0, tmp_path))
    assert file.getvalue() == ""


def test_an_error_leaves_the_terminal_as_it_was(tmp_path):
    terminal, before, calls = Terminal(), (sys.stdout, sys.stderr), []

    def spoiled(output, target):
        calls.append(output)
        if len(calls) > 8:  # in the third step
            raise RuntimeError("spoiled \033[31m")
        return mse_loss(output, target)

    with pytest.raises(penstock.errors.LaneError):
        fit(tmp_path, View(file=terminal), steps=6, loss=spoiled)
    assert (sys.stdout, sys.stderr) == before
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)
    assert "fault (error)" in terminal.plain
    assert "spoiled" in terminal.plain


def test_ctrl_c_in_the_first_picture_leaves_the_terminal_as_it_was(monkeypatch):
    """The interrupt came before the screen was entered, and the terminal got its cursor back after all was said."""

    def interrupted(self, *_, **__):
        raise KeyboardInterrupt

    terminal, before = Terminal(), (sys.stdout, sys.stderr)
    monkeypatch.setattr(Picture, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt), Screen(10, file=terminal):
        pass
    assert (sys.stdout, sys.stderr) == before
    assert terminal.getvalue().rindex(SHOW_CURSOR) > terminal.getvalue().rindex(HIDE_CURSOR)


def test_what_would_steer_the_terminal_is_shown_by_its_code():
    fault = {"kind": "error\033c", "step": 4, "message": "spoiled \033[31m\nand more"}
    assert fault_line(fault) == r"step 4: fault (error\x1bc): spoiled \x1b[31m" + "\nand more"


def test_lines_and_warnings_come_above_the_picture(tmp_path):
    terminal, trainer = Terminal(), pretended(tmp_path)
    with View(file=terminal) as view:
        view.on_train_begin(trainer)
        view.on_step_end(trainer, reading(line=timeline()))
        print("a line of the user's", file=sys.stdout)  # noqa: T201
        print("UserWarning: beware", file=sys.stderr)  # noqa: T201
        view.on_fault(
            trainer, {"kind": "nonfinite", "step": 3, "message": "step 3: the loss is not finite", "policy": "skip"}
        )
        view.on_recover(trainer, 2)
    text = terminal.plain
    for words in ("a line of the user's", "UserWarning: beware", "fault (nonfinite): step 3: the loss", "of step 2"):
        assert words in text
        assert text.rindex("1/10 steps") > text.index(words)


def test_a_slow_lane_is_told_once(tmp_path):
    file, trainer = io.StringIO(), pretended(tmp_path)
    slow = timeline(3, forward=[1.0, 1.0, 3.0], backward=[2.0, 2.0, 6.0])
    with View(file=file) as view:
        view.on_train_begin(trainer)
        for step in (1, 2, 3):
            trainer.step, trainer.reading = step, reading(step, line=slow)
            view.on_record(trainer, tmp_path)
    assert re.findall(r"step (\d): lane 2 takes 3.0 times as long as the others", file.getvalue()) == ["2"]


def test_the_summary_tells_of_what_did_not_work(tmp_path):
    file, trainer = io.StringIO(), pretended(tmp_path)
    (tmp_path / "events.jsonl").write_text("")
    with View(file=file) as view:
        view.on_train_begin(trainer)
        view.on_step_end(trainer, reading(loss=3.0))
        checkpoints = (tmp_path / "checkpoint-000001", tmp_path / "checkpoint-000002")
        summary = Summary(
            "SIGTERM", 7, 10, 2.0, 2.25, 70.0, tmp_path, checkpoints=checkpoints, failures=("No space left\non it",),
            skipped=tuple(range(1, 13)),
        )  # fmt: skip
        view.on_train_end(trainer, summary)
    text = file.getvalue()
    for words in (
        "Ended by SIGTERM: 7 of 10 steps, in 0:01:10", "loss        3.000 → 2.000", "validation  2.250",
        "checkpoint-000002 and 1 before", "events.jsonl", "not saved   No space left; on it",
        "the updates of steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 2 more", "To continue: run it again",
    ):  # fmt: skip
        assert words in text, words


def test_memory_is_called_what_it_is(tmp_path):
    for words, place in {
        "held": {}, "resident": {"lanes": (0,)}, "peak allocated": {"device": "cuda:0"},
    }.items():  # fmt: skip
        file, trainer = io.StringIO(), pretended(tmp_path, **place)
        with View(file=file) as view:
            view.on_train_begin(trainer)
            view.on_step_end(trainer, reading())
            view.on_log(trainer, {})
        assert f"at most 2 MiB {words} per lane" in file.getvalue()


def test_a_summary_of_nothing_says_so(tmp_path):
    def said(steps, **more):
        summary = Summary("done", 179, steps, None, None, 1.0, tmp_path, **more)
        return summary_lines(summary, first_loss=None, speed="", events=None, again=None)[0]

    told = "Nothing was trained: already at step 179, and steps = 3; increase steps"
    assert said(3, resumed_from=179) == told
    assert "already at step 179, and steps = 179" in said(179, resumed_from=179)
    assert said(179, resumed_from=100).startswith("Done: 179 of 179 steps, 100 of them before")
    assert "again" not in said(179, resumed_from=100)
    assert said(179, restarts=1).endswith("the processes were restarted once, and this is the time since then")
    assert "restarted 3 times" in said(179, restarts=3, resumed_from=100)


# ---- a terminal that goes away


def test_a_pipe_whose_reader_is_gone_ends_nothing(tmp_path):
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        view = View(file=file)
        trainer = pretended(tmp_path)
        view.on_train_begin(trainer)
        os.close(read)
        for step in range(1, 4):
            view.on_step_end(trainer, reading(step))
            view.on_log(trainer, {})
        view.on_train_end(trainer, Summary("done", 3, 3, 1.0, None, 1.0, tmp_path))


def test_a_terminal_that_is_closed_ends_nothing(tmp_path):
    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as file:
        screen = Screen(10, file=file)
        assert screen.is_live
        with screen:
            os.close(leader)
            for step in range(1, 4):
                screen.add(reading(step, line=timeline()))
                screen.log()
        assert screen._console.file.is_gone


def test_a_process_whose_output_nobody_reads_ends_well(tmp_path):
    code = (
        "import sys\n"
        "from penstock.training.view.view_screen import Screen\n"
        "from penstock.training.callbacks.callback import Reading\n"
        "with Screen(5000) as screen:\n"
        "    for step in range(1, 5001):\n"
        "        screen.add(Reading(step, 5000, 0, 1.0, 1.0, (0.1,), 0.1, 8))\n"
        "        screen.log()\n"
        "sys.exit(7)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert b"step    1 of 5000" in process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (7, b"")
    process.stderr.close()


def test_a_disk_that_is_full_may_have_room_again(tmp_path):
    class Full(io.StringIO):
        is_full = True

        def write(self, text):
            if self.is_full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    file = Full()
    outlet = Outlet(file)
    outlet.write("lost")
    file.is_full = False
    outlet.write("kept")
    assert (file.getvalue(), outlet.is_gone) == ("kept", False)


def test_a_terminal_that_knows_no_bars(tmp_path):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    outlet = Outlet(file)
    outlet.write("loss █▁ 2.5\n")
    outlet.flush()
    assert raw.getvalue() == b"loss ?? 2.5\n"
