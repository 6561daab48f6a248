"""Rows 7 and 10 in a training: a disk that is full, and numbers that are none; in threads and in processes."""

import os
import resource
import signal
import warnings

import torch
import torch.distributed as dist

import penstock
import processes
from faults.launched import losses
from penstock.errors import NonFiniteError
from pipelines import data
from training_runs import make, sequence


def small():
    model = sequence(4)
    return {"model": [model[:4], model[4:]], "analytic": None, "log_every": 1, "view": False, "checkpoint_every": 1}


class Kept(penstock.Callback):
    """Keeps the weights as they are before a step."""

    strict = True

    def on_step_begin(self, trainer):
        self.before = {name: value.clone() for name, value in trainer.pipe.state_dict().items()}


class Poisoned:
    """Batches of which one has a value that is none."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        for number in range(6):
            batch, target = data(8, seed=number)
            if number == self.at:
                batch[5, 2] = float("nan")
            yield batch, target


def train_with_nan(folder, faults, policy, batches=None, lanes=None):
    """Return what a training says of a NaN, whether it changed the weights, and how it ended."""
    os.environ["PENSTOCK_FAULTS"] = faults
    kept = Kept()
    given = small() | {"lanes": lanes, "on_nan": policy, "callbacks": [kept], "steps": 6, "batches": batches}
    trainer, pipe, _ = make(folder, **given)
    told, status, skipped = "", "", ()
    with pipe, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            summary = trainer.fit()
            status, skipped = summary.status, summary.skipped
        except NonFiniteError as error:
            told = str(error)
        weights = pipe.state_dict()
        is_as_before = all(torch.equal(weights[name], value) for name, value in kept.before.items())
        is_finite = all(bool(value.isfinite().all()) for value in weights.values())
        told += " ".join(str(one.message) for one in warned if "not finite" in str(one.message))
    return told, is_as_before, is_finite, status, list(skipped)


def everywhere(folder, *given):
    """Return what is said in threads, and in two processes."""
    try:
        threads = train_with_nan(folder / "threads", *given, lanes=2)
    finally:
        os.environ.pop("PENSTOCK_FAULTS", None)
    return [threads, *processes.run(train_with_nan, 2, folder / "processes", *given)]


def test_an_activation_that_is_no_number_stops_all_before_the_update(tmp_path):
    for told, is_as_before, is_finite, _, _ in everywhere(tmp_path, "nan@lane=1,step=4,action=F2", "stop"):
        assert "step 4: the loss is not finite" in told
        assert "lane 1" in told
        assert "micro-batch 2" in told
        assert "The weights are those of step 3" in told
        assert is_as_before
        assert is_finite


def test_a_gradient_that_is_no_number_is_skipped_by_all(tmp_path):
    for told, _, is_finite, status, skipped in everywhere(tmp_path, "nan@lane=0,step=4,action=B1", "skip"):
        assert "step 4: the gradients are not finite" in told
        assert "lane 0" in told
        assert (is_finite, status, skipped) == (True, "done", [4])
    assert losses(tmp_path / "threads") == losses(tmp_path / "processes")


def test_a_batch_that_is_no_number_rewinds_all(tmp_path):
    for told, _, is_finite, status, _ in everywhere(tmp_path, "", "rewind", Poisoned(3)):
        assert "rewinding" in told
        assert "micro-batch 2" in told
        assert (is_finite, status) == (True, "done")
    assert losses(tmp_path / "threads") == losses(tmp_path / "processes")


# ---- a disk that is full


class Full(penstock.Callback):
    """Lets no file grow, on lane 1, for some steps."""

    strict = True

    def on_step_end(self, trainer, reading):
        if dist.get_rank() == 1 and reading.step in (3, 5):
            trainer._checkpoints._saving.wait_written()  # that of the step before has had its chance
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500 if reading.step == 3 else hard, hard))


def train_on_a_full_disk(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    trainer, pipe, noted = make(folder, **small(), lanes=None, steps=6, callbacks=[Full()], keep_checkpoints=9)
    with pipe, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        summary = trainer.fit()
    told = [str(one.message) for one in warned if "NOT saved" in str(one.message)]
    return summary.status, list(summary.failures), told, noted.losses, [path.name for path in summary.checkpoints]


def test_a_disk_that_is_full_for_a_while_ends_no_training(tmp_path):
    """Two saves fail, loudly and in all processes; the one before stands, those after work, and losses are as ever."""
    for status, failures, told, seen, names in processes.run(train_on_a_full_disk, 2, tmp_path / "run"):
        assert status == "done"
        assert len(failures) == len(told) == 2
        assert all("File too large" in text and "bytes needed: " in text for text in told)
        assert names == [f"checkpoint-{step:06d}" for step in (1, 2, 5, 6)]
        assert seen == losses(tmp_path / "run")
    trainer, pipe, noted = make(tmp_path / "alone", **small(), steps=6)
    with pipe:
        trainer.fit()
    assert losses(tmp_path / "run") == noted.losses
    assert not list((tmp_path / "run").glob("tmp-*")), "nothing is left of those that failed"
