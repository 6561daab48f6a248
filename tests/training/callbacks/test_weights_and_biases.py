"""Weights & Biases: what a run of it gets; with the real package, if it is installed, offline."""

import sys
from types import SimpleNamespace

import pytest

from penstock.errors import UsageError
from penstock.training import WeightsAndBiases
from penstock.training.callbacks import weights_and_biases
from training_runs import StopAt, loader, make


class Run:
    """Writes down what is logged."""

    def __init__(self, **options):
        self.options, self.logs, self.summary, self.is_finished = options, {}, {}, False

    def log(self, figures, step):
        assert not self.is_finished
        self.logs.setdefault(step, {}).update(figures)

    def finish(self):
        self.is_finished = True


@pytest.fixture
def runs(monkeypatch):
    made = []
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **given: made.append(Run(**given)) or made[-1])
    )
    monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: name)
    return made


def fit(folder, *callbacks, **asked):
    trainer, pipe, _ = make(folder, callbacks=callbacks, **asked)
    with pipe:
        return trainer.fit()


def test_a_run_gets_the_figures_and_a_resumed_one_continues_it(tmp_path, runs):
    asked = {"log_every": 2, "validation": loader(16)}
    folder = tmp_path / "mine"
    fit(folder, WeightsAndBiases(project="pipes"), StopAt(3), steps=6, **asked)
    summary = fit(folder, WeightsAndBiases(project="pipes"), steps=6, **asked)
    first, second = runs
    assert all(run.is_finished for run in runs)
    assert first.options["project"] == "pipes"
    assert first.options["config"]["lanes"] == 2
    assert first.options["id"] == second.options["id"] == (folder / "wandb_id").read_text()
    assert second.options["resume"] == "allow"
    assert first.summary == {"status": "stopped"}
    assert {1, 2} <= set(first.logs)
    assert set(second.logs) == {4, 6}
    last = second.logs[6]
    assert last["train/loss"] == pytest.approx(summary.loss)
    assert last["validation/loss"] == pytest.approx(summary.validation)
    assert {"train/lr", "speed/samples_per_second", "memory/lane_1"} <= set(last)


def test_a_missing_package_gets_a_message(monkeypatch):
    monkeypatch.setattr(weights_and_biases, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install wandb"):
        WeightsAndBiases()


def test_the_real_package_writes_a_run_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")  # in no extra: it is a client of a service
    monkeypatch.setenv("WANDB_SILENT", "true")
    fit(tmp_path / "run", WeightsAndBiases(project="pipes", mode="offline"), steps=2, log_every=1)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    wandb.teardown()  # its service would outlive the test
