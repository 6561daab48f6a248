"""Processes that are kept ready take the place of lost ones; and go when there is nobody to work for."""

import json
import os
import signal
import subprocess

import pytest

from faults import launched
from penstock.launch.processes.spare_pool import Spares


def start(tmp_path, **keys):
    """Start a training that waits a little for each batch, and is told to end."""
    given = {"nproc": 2, "steps": 100_000, "data_args": {"pause": 0.02}, "spares": True} | keys
    return launched.launch(launched.config(tmp_path / "run.toml", **given), spare_seconds=0.0)


def wait_for_spares(run):
    run.wait_for(lambda: len(run.spares()) == 2, "spares")
    return set(run.spares())


def step_of(run):
    return max(launched.losses(run.folder))


def test_spares_take_the_place_of_lost_processes_again_and_again(tmp_path):
    with start(tmp_path) as run:
        run.wait_for_step(3)
        spares, first = wait_for_spares(run), set(run.workers())
        for victim in (0, 1):
            before = step_of(run)
            os.kill(sorted(run.workers())[victim], signal.SIGKILL)
            run.wait_for_step(before + 5)
            taken, spares = spares, wait_for_spares(run)
            assert set(run.workers()) == taken
            assert not taken & spares
        run.signal(signal.SIGTERM)
        assert run.wait() == 0
        assert "Traceback" not in run.told()
    assert not any(map(launched.is_there, first | taken | spares))
    assert [line["kind"] for line in launched.faults(run.folder, "restart")] == ["restart"] * 2
    steps = step_of(run)
    alone = tmp_path / "alone"
    alone.mkdir()
    code, told = launched.train(launched.config(alone / "run.toml", lanes=2, steps=steps))
    assert code == 0, told
    assert launched.losses(run.folder) == launched.losses(alone / "run")
    assert launched.is_same(launched.weights(run.folder), launched.weights(alone / "run"))
    assert [path.name for path in sorted((run.folder / "logs").glob("attempt_*"))] == [f"attempt_{n}" for n in range(3)]


def test_spares_go_with_their_launcher(tmp_path):
    with start(tmp_path) as run:
        run.wait_for_step(1)
        left = [*wait_for_spares(run), *run.workers()]
        os.kill(run.pid, signal.SIGKILL)
        launched.are_gone(left)


@pytest.mark.full
def test_a_spare_that_is_lost_itself_is_not_missed(tmp_path):
    with start(tmp_path) as run:
        run.wait_for_step(1)
        for spare in wait_for_spares(run):
            os.kill(spare, signal.SIGKILL)
        before = step_of(run)
        os.kill(run.workers()[0], signal.SIGKILL)
        run.wait_for_step(before + 3)
        assert all(b"penstock.launch.worker" in launched.command_of(pid) for pid in run.workers())
        run.signal(signal.SIGTERM)
        assert run.wait() == 0


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"spares": False}, {"max_restarts": 0}])
def test_there_are_none_where_none_are_wanted(tmp_path, keys):
    with start(tmp_path, **keys) as run:
        run.wait_for_step(3)
        assert len(run.workers()) == 2
        assert not [pid for pid in launched.children(run.pid) if b"spare" in launched.command_of(pid)]


def test_what_was_measured_is_not_measured_again(tmp_path):
    """A restart runs the plan of those before it, and so does a start by hand with the same settings."""
    own = f"{launched.JOBS}:chain"
    path = launched.config(tmp_path / "run.toml", model=own, nproc=2, steps=3)
    code, told = launched.train(path)
    assert code == 0, told

    def plan():
        return {**json.loads((tmp_path / "run" / "plan.json").read_text()), "predicted": None}

    first = plan()
    assert first["explanation"]["profile"]["method"] == "measured"
    launched.config(path, model=own, nproc=2, steps=100_000, data_args={"pause": 0.02})
    with launched.launch(path) as run:
        run.wait_for_step(5)
        os.kill(run.workers()[1], signal.SIGKILL)
        assert plan() == first
        before = step_of(run)
        run.wait_for_step(before + 5)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0
    assert plan() == first


OTHER = """

class Other(nn.Sequential):
    def forward(self, x):
        return super().forward(x.neg().neg())
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", ["another model", "damaged"])
def test_a_kept_plan_that_does_not_fit_is_made_anew(tmp_path, what):
    """The model is another one by now, or the file was damaged: a restart goes on all the same."""
    own = tmp_path / "own.py"
    text = (
        "from torch import nn\n\n\ndef model():\n"
        "    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())))\n"
    )
    own.write_text(text)
    path = launched.config(
        tmp_path / "run.toml", model=f"{own}:model", nproc=2, steps=100_000, data_args={"pause": 0.02}
    )
    with launched.launch(path) as run:
        run.wait_for_step(5)
        if what == "damaged":
            kept = run.folder / "plan.json"
            kept.write_text(kept.read_text()[:100])
        else:  # with parameters of the same names
            own.write_text(text.replace("return nn.Sequential(", "return Other(") + OTHER)
        before = step_of(run)
        os.kill(run.workers()[1], signal.SIGKILL)
        run.wait_for_step(before + 5)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.told()


def test_a_machine_without_room_for_spares_trains_without(monkeypatch):
    def popen(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    spares = Spares(2, "run.toml", seconds=0.0)
    spares.note_start()
    spares.poll()
    assert spares.take() is None
    spares.close()
