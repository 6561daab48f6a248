"""The trainer: the plain loop's losses and weights, wherever it is ended and resumed."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import LaneError, NonFiniteError, UsageError
from pipelines import data, sequence
from training_runs import Noted, StopAt, dropping, loader, make, plain, train, train_here


def as_numbers(value):
    return torch.as_tensor(value, dtype=torch.float64)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(as_numbers(found[key]), as_numbers(value), rtol=1e-10, atol=1e-12), key


# ---- the same as without


@pytest.mark.parametrize("lanes", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_losses_and_weights_are_those_of_a_plain_loop(tmp_path, schedule, lanes):
    losses, weights = plain(clip=0.5)
    summary, found, trained = train(tmp_path / "run", schedule=schedule, lanes=lanes, clip=0.5)
    assert (summary.status, summary.step, summary.resumed_from) == ("done", 7, None)
    assert_same(found, losses)
    assert_same(trained, weights)


def test_several_batches_of_an_update(tmp_path):
    losses, weights = plain(accumulate=3, steps=4)
    _, found, trained = train(tmp_path / "run", accumulate=3, steps=4)
    assert_same(found, losses)
    assert_same(trained, weights)


def test_a_schedule_that_updates_within_the_step(tmp_path):
    model = sequence(8)
    pipe = penstock.Pipeline(
        model, example=data(8)[0], loss=nn.functional.mse_loss, lanes=2, schedule="pipedream_2bw", micro_batches=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), analytic="h100",
    )  # fmt: skip
    with pipe:
        with pytest.raises(UsageError, match="updates weights within the step"):
            penstock.Trainer(pipe, torch.optim.SGD(pipe.parameters()), loader(), steps=3, folder=tmp_path / "run")
        summary = penstock.Trainer(pipe, None, loader(), steps=6, folder=tmp_path / "run").fit()
        assert summary.is_done
        assert summary.loss < nn.functional.mse_loss(sequence(8)(data(24)[0]), data(24)[1])


@pytest.mark.parametrize(("lanes", "wanted"), [(1, 4), (2, 2), (3, 1)])
def test_a_trainer_leaves_the_cores_to_the_lanes(tmp_path, lanes, wanted):
    seen = []

    class Look(penstock.Callback):
        def on_pre_optimizer_step(self, trainer):
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        train(tmp_path / "run", lanes=lanes, steps=2, callbacks=[Look()])
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert seen == [wanted] * 2


# ---- ended and resumed


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_what_is_resumed_goes_on_as_if_nothing_had_been(tmp_path, at, own):
    """In the middle of a shuffled epoch, at its end, with dropout: the same samples, the same random numbers."""
    _, losses, weights = train(tmp_path / "whole", model=dropping(rate=0.2), batches=loader(own=own))
    first, begun, _ = train(tmp_path / "run", model=dropping(rate=0.2), batches=loader(own=own), callbacks=[StopAt(at)])
    assert (first.status, first.step) == ("stopped", at)
    torch.manual_seed(99)
    second, rest, trained = train(tmp_path / "run", model=dropping(rate=0.2), batches=loader(own=own), seed=77)
    assert (second.status, second.step, second.resumed_from) == ("done", 7, at)
    assert_same(begun | rest, losses)
    assert_same(trained, weights)


@pytest.mark.parametrize("lanes", [1, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved_1f1b"])
def test_other_lanes_and_another_schedule_go_on_with_the_same_losses(tmp_path, lanes, schedule):
    losses, weights = plain()
    _, begun, _ = train(tmp_path / "run", callbacks=[StopAt(4)])
    _, rest, trained = train(tmp_path / "run", lanes=lanes, schedule=schedule)
    assert_same(begun | rest, losses)
    assert_same(trained, weights)


def test_a_run_that_is_done_has_nothing_left_to_do(tmp_path):
    train(tmp_path / "run", steps=3)
    summary, losses, _ = train(tmp_path / "run", steps=3)
    assert (summary.status, summary.step, losses) == ("done", 3, {})
    summary, losses, _ = train(tmp_path / "run", steps=5)
    assert sorted(losses) == [4, 5]


def test_checkpoints_on_the_way(tmp_path):
    trainer, pipe, noted = make(tmp_path / "run", checkpoint_every=2, keep_checkpoints=2)
    with pipe:
        summary = trainer.fit()
    assert [folder.name for folder in summary.checkpoints] == ["checkpoint-000006", "checkpoint-000007"]
    assert [step for kind, step in noted.told if kind == "save"] == [2, 4, 6, 7]
    assert noted.told[0] == ("begin", 0)
    assert noted.told[-1] == ("end", "done")


def test_resume_never_and_from_a_place(tmp_path):
    train(tmp_path / "run", callbacks=[StopAt(3)])
    with pytest.raises(UsageError, match="checkpoints of an earlier training"):
        train(tmp_path / "run", resume="never")
    summary, losses, _ = train(tmp_path / "other", resume=tmp_path / "run" / "checkpoint-000003")
    assert (summary.resumed_from, sorted(losses)) == (3, [4, 5, 6, 7])
    with pytest.raises(penstock.errors.PenstockError, match="nowhere"):
        train(tmp_path / "third", resume=tmp_path / "nowhere")


@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_the_same_and_go_on_where_threads_ended(tmp_path, count):
    losses, weights = plain()
    _, begun, _ = train(tmp_path / "run", callbacks=[StopAt(3)])
    results = processes.run(train_here, count, tmp_path / "run", {"checkpoint_every": 2})
    together = {}
    for status, rest, part in results:
        assert status == "done"
        assert_same(begun | rest, losses)
        together |= part
    assert_same(together, weights)
    _, later, _ = train(tmp_path / "run", lanes=2, steps=9)
    assert_same(losses | later, plain(steps=9)[0])


# ---- told to end


def test_sigterm_ends_it_with_a_checkpoint(tmp_path):
    class Terminated(penstock.Callback):
        def on_step_begin(self, trainer):
            if trainer.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    summary, _losses, _ = train(tmp_path / "run", callbacks=[Terminated()])
    assert (summary.status, summary.step) == ("SIGTERM", 3)
    assert [folder.name for folder in summary.checkpoints] == ["checkpoint-000003"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert train(tmp_path / "run")[0].resumed_from == 3


def test_ctrl_c_twice_leaves_at_once(tmp_path):
    class Impatient(penstock.Callback):
        def on_step_begin(self, trainer):
            if trainer.step == 2:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", callbacks=[Impatient()], checkpoint_every=1)
    assert train(tmp_path / "run")[0].resumed_from == 2


def test_time_that_is_up(tmp_path):
    summary, _, _ = train(tmp_path / "run", max_seconds=1e-6)
    assert (summary.status, summary.step) == ("time", 1)


# ---- what goes wrong


class Poisoned:
    """Batches of which one has a sample that is not a number."""

    def __init__(self, at, count=7):
        self.at, self.count = at, count

    def __iter__(self):
        for number in range(self.count):
            batch, target = data(8, seed=number)
            if number == self.at:
                batch[5, 2] = float("nan")
            yield batch, target


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(tmp_path):
    _, _, weights = train(tmp_path / "good", batches=Poisoned(None), steps=3)
    trainer, pipe, noted = make(tmp_path / "run", batches=Poisoned(3))
    with pipe:
        with pytest.raises(NonFiniteError, match=r"(?s)step 4.*micro-batch 2.*weights are those of step 3"):
            trainer.fit()
        assert_same(pipe.state_dict(), weights)
    assert ("fault", "nonfinite") in noted.told
    fault = json.loads((tmp_path / "run" / "faults.jsonl").read_text().splitlines()[0])
    assert (fault["kind"], fault["step"]) == ("nonfinite", 4)


def test_a_loss_that_is_not_finite_is_skipped(tmp_path):
    with pytest.warns(UserWarning, match="step 4: the loss is not finite"):
        summary, _losses, weights = train(tmp_path / "run", batches=Poisoned(3), on_nan="skip")
    assert summary.skipped == (4,)
    assert summary.is_done
    assert all(value.isfinite().all() for value in weights.values())


def test_a_loss_that_is_not_finite_rewinds(tmp_path):
    with pytest.warns(UserWarning, match="rewinding"):
        summary, _losses, weights = train(tmp_path / "run", batches=Poisoned(3), on_nan="rewind", checkpoint_every=2)
    assert summary.is_done
    assert all(value.isfinite().all() for value in weights.values())
    with pytest.warns(UserWarning, match="rewinding"), pytest.raises(NonFiniteError, match="no checkpoint"):
        train(tmp_path / "other", batches=Poisoned(1), on_nan="rewind")


def test_callbacks_that_fail_are_told_once_and_training_goes_on(tmp_path):
    class Broken(penstock.Callback):
        def on_step_end(self, trainer, reading):
            raise RuntimeError("oh")

    with pytest.warns(UserWarning, match=r"Broken.on_step_end raised RuntimeError: oh") as told:
        summary, _, _ = train(tmp_path / "run", callbacks=[Broken()])
    assert len(told) == 1
    assert summary.is_done
    strict = Broken()
    strict.strict = True
    with pytest.raises(RuntimeError, match="oh"):
        train(tmp_path / "other", callbacks=[strict])


class Ending:
    """Data that can be iterated over once."""

    def __init__(self, count, error=None):
        self.count, self.error = count, error

    def __iter__(self):
        while self.count:
            self.count -= 1
            yield tuple(data(8, seed=self.count))
        if self.error is not None:
            raise self.error


def test_data_that_ends_early(tmp_path):
    summary, losses, _ = train(tmp_path / "run", batches=Ending(3))
    assert (summary.status, summary.step, sorted(losses)) == ("data ended", 3, [1, 2, 3])
    assert [folder.name for folder in summary.checkpoints] == ["checkpoint-000003"]


def test_data_that_raises(tmp_path):
    with pytest.raises(KeyError, match="lost"):
        train(tmp_path / "run", batches=Ending(3, KeyError("lost")), checkpoint_every=1)
    assert json.loads((tmp_path / "run" / "faults.jsonl").read_text())["message"] == "KeyError: 'lost'"
    assert train(tmp_path / "run", batches=Ending(9))[0].resumed_from == 3


def test_a_model_that_raises_names_its_place_and_keeps_the_checkpoint(tmp_path):
    class Raising(nn.Module):
        def forward(self, x):
            if x.isnan().any():
                raise ArithmeticError("in my own code")
            return x

    layers = list(sequence(4))
    model = nn.Sequential(*layers[:4], Raising(), *layers[4:])
    with pytest.raises(LaneError, match=r"micro-batch 2.*in my own code"):
        train(tmp_path / "run", model=model, batches=Poisoned(3), checkpoint_every=1, analytic=None)
    assert train(tmp_path / "run", model=model, batches=Poisoned(None), analytic=None)[0].resumed_from == 3


def test_validation_is_a_mean_over_samples(tmp_path):
    batches = [tuple(data(8, seed=3)), tuple(data(4, seed=4))]
    trainer, pipe, noted = make(tmp_path / "run", validation=batches, validate_every=3)
    with pipe:
        summary = trainer.fit()
        losses = [float(pipe.evaluate(*batch)) for batch in batches]
    assert summary.validation == pytest.approx((8 * losses[0] + 4 * losses[1]) / 12)
    assert [step for kind, step in noted.told if kind == "evaluate"] == [3, 6, 7]


def test_a_signal_ends_a_validation_which_is_made_up_for(tmp_path):
    class Long:
        """Validation data that goes on and on, and within which the training is told to end, once."""

        given, is_told = 0, False

        def __iter__(self):
            for number in range(8):
                Long.given += 1
                if number == 2 and not Long.is_told:
                    Long.is_told = True
                    os.kill(os.getpid(), signal.SIGTERM)
                yield tuple(data(8, seed=number))

    given = {"validation": Long(), "validate_every": 3, "checkpoint_every": 3, "steps": 7}
    summary, *_ = train(tmp_path / "run", **given)
    assert (summary.status, summary.step, summary.validation) == ("SIGTERM", 3, None)
    assert Long.given == 3
    trainer, pipe, noted = make(tmp_path / "run", **given)
    with pipe:
        assert trainer.fit().is_done
    assert [step for kind, step in noted.told if kind == "evaluate"] == [3, 6, 7]
    # twice in the same one: it is still made up for
    Long.is_told = False
    assert train(tmp_path / "twice", **given)[0].status == "SIGTERM"
    Long.is_told = False
    summary, *_ = train(tmp_path / "twice", **given)
    assert (summary.status, summary.step) == ("SIGTERM", 3)
    trainer, pipe, noted = make(tmp_path / "twice", **given)
    with pipe:
        assert trainer.fit().is_done
    assert [step for kind, step in noted.told if kind == "evaluate"] == [3, 6, 7]
    # after the last step: all is saved, and the next start validates
    Long.is_told = False
    summary, *_ = train(tmp_path / "end", **given | {"validate_every": 0})
    assert (summary.status, summary.step, summary.validation) == ("SIGTERM", 7, None)
    summary, *_ = train(tmp_path / "end", **given | {"validate_every": 0})
    assert summary.is_done
    assert summary.validation is not None


# ---- one training at a time


def test_two_trainings_in_one_folder(tmp_path):
    class Second(Noted):
        def on_step_begin(self, trainer):
            if trainer.step == 1:
                with pytest.raises(UsageError, match=rf"another training is running.*process {os.getpid()}"):
                    train(tmp_path / "run")

    assert train(tmp_path / "run", callbacks=[Second()])[0].is_done


def test_a_training_that_was_killed_leaves_the_folder_to_the_next(tmp_path):
    script = (
        "import os, signal, penstock\nfrom training_runs import train\n"
        "class Kill(penstock.Callback):\n"
        "    def on_step_end(self, trainer, reading):\n"
        "        if reading.step == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"train({str(tmp_path / 'run')!r}, callbacks=[Kill()], checkpoint_every=1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd="tests", check=False)
    assert ended.returncode == -signal.SIGKILL
    summary, _losses, weights = train(tmp_path / "run")
    assert summary.resumed_from in (2, 3)  # the third may have been on its way
    assert_same(weights, plain()[1])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "steps: must be a whole number of at least 1"),
        ({"steps": 2.5}, "steps: must be"),
        ({"clip": -1.0}, "clip: must be a number above zero"),
        ({"on_nan": "stopp"}, "Did you mean 'stop'"),
        ({"on_oom": "splt"}, "Did you mean 'split'"),
        ({"log_every": 0, "checkpoint_every": -1}, "log_every: .*checkpoint_every: |checkpoint_every: .*log_every: "),
        ({"resume": 3}, "resume: must be"),
        ({"callbacks": [3]}, "callbacks: expected"),
    ],
)
def test_wrong_arguments(tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message):
        make(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(penstock.errors.OutputError, match="cannot be used as a run folder"):
        train(tmp_path / "file")


def with_error(output, target):
    loss = nn.functional.mse_loss(output, target)
    return {"loss": loss, "error": (output - target).abs().mean()}


def test_what_a_loss_returns_beside_the_loss_is_logged_and_validated(tmp_path):
    """It was dropped."""
    train(tmp_path, loss=with_error, steps=3, log_every=1, validation=loader(), validate_every=3, view=False)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    logged = [line["metrics"]["error"] for line in lines if line["event"] == "log"]
    assert len(logged) == 3
    assert all(0 < error < 10 for error in logged)
    (validated,) = [line["metrics"]["error"] for line in lines if line["event"] == "evaluate"]
    assert 0 < validated < 10
