"""Rows 24, 25, 26 and 31: a terminal's Ctrl-C and its end; a launcher that is killed; a folder that is taken."""

import os
import signal
import termios

import pytest

from faults import launched
from faults.launched import JOBS, are_gone, config, descendants, launch, train

LONG = {"steps": 100_000, "data_args": {"pause": 0.05}}


def modes(terminal):
    return termios.tcgetattr(terminal)[:4]


def loads(folder):
    """Return the step of the newest checkpoint, which is complete: everything in it is read."""
    assert launched.weights(folder)
    return int(launched.newest(folder).name.removeprefix("checkpoint-"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("lanes", [{"lanes": 2}, {"nproc": 2}], ids=["threads", "processes"])
def test_ctrl_c_in_a_terminal(tmp_path, lanes):
    """The key goes to all processes of the terminal at once, and still it is one: it is saved, and the code is 130."""
    with launch(config(tmp_path / "run.toml", **LONG, **lanes), terminal=True) as run:
        before = modes(run.terminal)
        run.wait_for_step(2)
        all_of_it = descendants(run.pid)
        os.write(run.terminal, b"\x03")
        assert run.wait() == 130, run.told()
        are_gone(all_of_it, 10)
        assert modes(run.terminal) == before
        shown = run.shown.decode(errors="replace")
    assert shown.rfind("\x1b[?25h") >= shown.rfind("\x1b[?25l"), "the cursor is there again"
    (end,) = launched.events(tmp_path / "run", "train_end")
    assert (end["status"], end["step"]) == ("SIGINT", loads(tmp_path / "run"))
    assert "Traceback" not in shown


@pytest.mark.parametrize("lanes", [{"lanes": 2}, {"nproc": 2}], ids=["threads", "processes"])
def test_a_terminal_that_is_closed(tmp_path, lanes):
    """SIGHUP, as when a connection is lost: it is saved, and is no failure."""
    with launch(config(tmp_path / "run.toml", **LONG, **lanes), terminal=True) as run:
        run.wait_for_step(2)
        all_of_it = descendants(run.pid)
        run.hang_up()
        assert run.wait() == 0
        are_gone(all_of_it, 10)
    (end,) = launched.events(tmp_path / "run", "train_end")
    assert (end["status"], end["step"]) == ("SIGHUP" if "lanes" in lanes else "SIGTERM", loads(tmp_path / "run"))


def test_ctrl_c_twice_in_a_terminal(tmp_path):
    """Out at once, with nobody left, and the checkpoint before stands."""
    keys = LONG | {"data_args": {"pause": 0.5}, "nproc": 2}
    with launch(config(tmp_path / "run.toml", **keys), terminal=True) as run:
        before = modes(run.terminal)
        run.wait_for_step(2)
        all_of_it = descendants(run.pid)
        os.write(run.terminal, b"\x03")
        run.wait_for(lambda: b"SIGINT" in run.shown, "word of the first")
        os.write(run.terminal, b"\x03")
        assert run.wait() == 130, run.told()
        are_gone(all_of_it, 10)
        assert modes(run.terminal) == before
    assert loads(tmp_path / "run") >= 1


def test_a_folder_that_is_taken_and_a_launcher_that_is_killed(tmp_path):
    """One training at a time, in processes and in threads; when the first is killed, others go on, with other lanes.

    Row 27 too: two processes, one of which starts late, then three, then one lane.
    """
    keys = {"model": f"{JOBS}:late_chain", "cuts": None}
    path = config(tmp_path / "run.toml", **LONG, **keys, nproc=2)
    second = config(tmp_path / "second.toml", **keys, lanes=1, folder=str(tmp_path / "run"))
    with launch(path) as run:
        run.wait_for_step(3)
        workers = run.workers()
        assert len(workers) == 2
        ports = launched.listeners({run.pid, *descendants(run.pid)})
        assert all(address in ("127.0.0.1", "::1") for address, _ in ports), ports
        code, told = train(second)
        assert code == 2, told
        assert "another training is running in this folder (process " in told
        assert told.count("\n") == 2  # a line before it says that the folder's plan is of other lanes
        run.signal(signal.SIGKILL)
        assert are_gone(workers, 10) < 5
        assert not launched.listeners({run.pid, *workers})
    reached = loads(tmp_path / "run")
    assert reached >= 1
    third = config(tmp_path / "third.toml", **keys, nproc=3, steps=reached + 1, folder=str(tmp_path / "run"))
    code, told = train(third)
    assert code == 0, told
    assert loads(tmp_path / "run") == reached + 1
    code, told = train(second, "--steps", reached + 2)
    assert code == 0, told
    plans = [(line["plan"]["lanes"], line["resumed_from"]) for line in launched.events(tmp_path / "run", "train_begin")]
    assert plans == [(2, None), (3, reached), (1, reached + 1)]
