"""Row 3: a lane that hangs is named: stopped, spinning in Python, or in a call that never lets go of Python."""

import contextlib
import ctypes
import io
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import processes
from faults.launched import JOBS, config, launch, train
from penstock.errors import HangError, LaneError
from penstock.runtime.lanes import process_lanes as signs
from penstock.runtime.lanes.hang_report import state_of
from pipelines import WIDTH, data

_SECONDS = 60.0


class Switch:
    """Says what is to be done; modules may be copied, this is not."""

    todo = None

    def __deepcopy__(self, memo):
        return self


class Trap(nn.Module):
    """Does what its switch says."""

    def __init__(self, switch):
        super().__init__()
        self.linear, self.switch = nn.Linear(WIDTH, WIDTH).double(), switch

    def forward(self, x):
        if self.switch.todo is not None:
            self.switch.todo()
        return self.linear(x)


def spins_for_ever():
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        pass


def holds_the_interpreter():
    end = time.monotonic() + 20
    while time.monotonic() < end:
        ctypes.PyDLL(None).usleep(500_000)  # as a C extension does that never releases it


def stops():
    os.kill(os.getpid(), signal.SIGSTOP)


def make():
    switch = Switch()
    stages = [nn.Linear(WIDTH, WIDTH).double(), Trap(switch)]
    pipe = penstock.Pipeline(stages, example=data(8)[0], loss=nn.functional.mse_loss, micro_batches=4, lanes=2)
    pipe.step(*data(8))
    return pipe, switch


def caught(pipe):
    """Return what a step says of a hang, its notes with it."""
    begin = time.monotonic()
    try:
        pipe.step(*data(8))
    except HangError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())]), time.monotonic() - begin
    return "no error", 0.0


def hanging_process(todo):
    pipe, switch = make()
    dist.barrier()  # both lanes have ended the first step
    pipe.timeout = 2.0
    if dist.get_rank() == 1:
        switch.todo = globals()[todo]
    return caught(pipe)


@pytest.mark.parametrize(
    ("todo", "words", "stack"),
    [
        ("stops", "is stopped (SIGSTOP, or Ctrl-Z)", ""),
        ("spins_for_ever", "its process", "in spins_for_ever"),  # at this moment it may wait for Python's lock
        ("holds_the_interpreter", "its process", "in holds_the_interpreter"),
    ],
)
def test_a_process_that_hangs_is_named_with_what_it_does(todo, words, stack):
    """In a forward of lane 1: lane 0 finds out, and says which process, its state, and the user's function."""
    started = processes.start(hanging_process, 2, todo)
    (_, ours), (second, _) = started
    try:
        assert ours.poll(_SECONDS)
        is_fine, (told, seconds) = ours.recv()
        assert is_fine
        assert f"; its process {second.pid} " in told
        assert "from lane 1, which is at 1F" in told
        assert words in told
        assert stack in told
        assert "most recent call first" in told if stack else "most recent call first" not in told
        assert 1.0 <= seconds < 20.0
    finally:
        second.kill()
        for process, pipe in started:
            process.join(_SECONDS)
            pipe.close()


def crowded_process(todo):
    """Let lane 1 stop in its first forward, while lane 0 sends it 256 messages of 8 KB, more than a socket holds."""
    switch = Switch()
    wide = 1024
    trap = Trap(switch)
    trap.linear = nn.Linear(wide, 1).double()
    x, target = torch.ones(256, wide, dtype=torch.float64), torch.ones(256, 1, dtype=torch.float64)
    pipe = penstock.Pipeline(
        [nn.Linear(wide, wide).double(), trap], example=x, loss=nn.functional.mse_loss, micro_batches=256, lanes=2,
        schedule="gpipe",
    )  # fmt: skip
    losses = [float(pipe.step(x, target)) for _ in range(2)]
    pipe.timeout = 1.5

    def sleeps():
        switch.todo = None
        time.sleep(4)

    if dist.get_rank() == 1:
        switch.todo = sleeps if todo == "sleeps" else globals()[todo]
    begin = time.monotonic()
    try:
        pipe.step(x, target)
    except HangError as error:
        told, seconds = str(error), time.monotonic() - begin
    switch.todo, pipe.timeout = None, _SECONDS
    if todo == "sleeps":  # what did not fit into the socket goes first when it wakes up, and it hears of the failure
        losses.append(float(pipe.step(x, target)))
    return told, seconds, losses


def test_a_lane_that_reads_again_goes_on_with_the_others():
    (told, _, ours), (same, _, theirs) = processes.run(crowded_process, 2, "sleeps")
    assert "lane 0 has waited 1.5 s to send to lane 1, which reads nothing" in told
    assert told == same
    assert len({*ours, *theirs}) == 1
    assert len(ours) == 3


@pytest.mark.parametrize(("todo", "words"), [("stops", "is stopped (SIGSTOP, or Ctrl-Z)"), ("spins_for_ever", "")])
def test_a_lane_that_reads_nothing_is_named_by_who_sends_to_it(todo, words):
    """The sender waited for ever, past its timeout, and named nobody."""
    started = processes.start(crowded_process, 2, todo)
    (_, ours), (second, _) = started
    try:
        assert ours.poll(_SECONDS)
        is_fine, (told, seconds, losses) = ours.recv()
        assert is_fine
        assert "lane 0 has waited 1.5 s to send to lane 1, which reads nothing: it is at 1F" in told
        assert f"; its process {second.pid} " in told
        assert words in told
        assert seconds >= 1.5
        assert losses[0] == losses[1]
    finally:
        second.kill()
        for process, pipe in started:
            process.join(_SECONDS)
            pipe.close()


def stopped_process():
    """Stop lane 1 where it waits for what lane 0 has sent by then."""
    pipe, _ = make()
    pipe.timeout = 1.5
    if dist.get_rank() == 1:
        link = pipe.internals.group._links
        read = link.read

        def reading(seconds):  # the lane waits: its row says so; what it waits for is on its way, and is never read
            place = pipe.internals.group._board.place(1)
            if place.at >= 0 and place.step > 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            return read(seconds)

        link.read = reading
    return caught(pipe)


def test_a_process_that_is_stopped_while_it_waits_is_the_one_that_does_not_go_on():
    """It seems to wait for lane 0, and lane 0 waits for it: but lane 0 has sent what is waited for."""
    started = processes.start(stopped_process, 2)
    (_, ours), (second, _) = started
    try:
        assert ours.poll(_SECONDS)
        is_fine, (told, _) = ours.recv()
        assert is_fine
        assert "although lane 0 has sent this value: lane 1 itself does not continue" in told
        assert told.endswith(f"its process {second.pid} is stopped (SIGSTOP, or Ctrl-Z)")
    finally:
        second.kill()
        for process, pipe in started:
            process.join(_SECONDS)
            pipe.close()


@pytest.mark.full
def test_a_process_that_is_stopped_while_it_measures_is_named(tmp_path):
    """The others waited 600 s for it, without a word."""
    path = config(tmp_path / "run.toml", model=f"{JOBS}:stopping_chain", model_args={"where": "measure"})
    code, told = train(path, "--nproc", 2)
    assert re.search(
        r"Error: lane 1 has waited 1\d s for lane 0, which .*, and has sent no heartbeat for 1\d s; its process", told
    )
    assert "is stopped (SIGSTOP, or Ctrl-Z)" in told
    assert "process 0 did not end by itself and was killed: all processes restart" in told
    assert code == 0, told


def test_a_process_that_is_stopped_before_all_have_met_is_named(tmp_path):
    """The others cannot know: the launcher says it."""
    path = config(tmp_path / "run.toml", model=f"{JOBS}:stopping_chain", model_args={"where": "make"})
    with launch(path, "--nproc", 2) as made:
        made.wait_for(
            lambda: made.err.exists() and "is stopped (SIGSTOP, or Ctrl-Z); the others" in made.err.read_text(),
            "word of it",
        )
        (stopped,) = (pid for pid in made.workers() if " is stopped " in state_of(pid))
        assert f"lane 1: its process {stopped} is stopped" in made.told()
        os.kill(stopped, signal.SIGCONT)
        assert made.wait() == 0, made.told()


def busy_process(seconds, todo):
    """Let lane 0 take long, or stop, while it measures; return what lane 1 said meanwhile, and how it ended."""
    signs._SAY_FIRST_SECONDS, signs._SAY_SECONDS, signs._SILENT_SECONDS = 1.0, 1.0, 3.0
    switch, said = Switch(), io.StringIO()

    def once():
        switch.todo = None
        if dist.get_rank() == 0:
            globals()[todo](seconds)

    model = nn.Sequential(Trap(switch), nn.Linear(WIDTH, WIDTH).double())
    switch.todo = once
    with contextlib.redirect_stderr(said):
        try:
            penstock.Pipeline(model, example=data(8)[0], loss=nn.functional.mse_loss, micro_batches=4, cuts=[1]).close()
        except LaneError as error:  # lane 0 finds nobody there when it comes back
            return said.getvalue(), str(error)
    return said.getvalue(), "no error"


def sleeps(seconds):
    time.sleep(seconds)


def keeps_the_interpreter(seconds):
    time.sleep(2)
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_lane_that_measures_for_long_is_waited_for_and_talked_of():
    (quiet, one), (said, other) = processes.run(busy_process, 2, 5.0, "sleeps")
    assert (one, other, quiet) == ("no error", "no error", "")
    assert "lane 1 has waited 2 s for lane 0, which captures, measures and cuts the model\n" in said


def test_a_lane_that_gives_no_sign_while_it_measures_is_named():
    (_, one), (_, other) = processes.run(busy_process, 2, 8.0, "keeps_the_interpreter")
    assert "lane 1 has waited" in other
    assert (
        "for lane 0, which captures, measures and cuts the model, and has sent no heartbeat for 3 s; its proc" in other
    )
    assert one == "no error" or "lane 1" in one


def test_a_thread_that_hangs_shows_where_it_is():
    go_on = threading.Event()

    def waits_for_ever():
        go_on.wait(_SECONDS)

    pipe, switch = make()
    with pipe:
        pipe.timeout = 2.0  # a busy machine may keep lane 0 waiting for a core
        switch.todo = waits_for_ever
        threading.Timer(5.0, go_on.set).start()
        told, _ = caught(pipe)
        switch.todo = None
    assert "from lane 1, which is at 1F" in told
    assert "in waits_for_ever" in told


def test_the_state_of_processes():
    assert state_of(os.getpid()) == f"its process {os.getpid()} is running"
    assert state_of(1 << 22) == f"its process {1 << 22} is gone"
    assert state_of(-1) == ""
