"""Trainings as users set them up: scalers, odd items, full disks, data workers, paths that move."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock
from penstock.errors import CheckpointError, NonFiniteError, UsageError
from pipelines import WIDTH, data, sequence
from training_runs import StopAt, loader, make, train


def pipeline(model=None, *, example=None, loss=nn.functional.mse_loss, **given):
    example = data(8)[0] if example is None else example
    settings = {"lanes": 2, "micro_batches": 4, "analytic": "h100", **given}
    return penstock.Pipeline(sequence(8) if model is None else model, example=example, loss=loss, **settings)


def poisoned(at, count=5):
    """Return batches of which one has a number that is none."""
    batches = [tuple(data(8, seed=number)) for number in range(count)]
    batches[at][0][5, 2] = float("nan")
    return batches


# ---- numbers that are none


def test_a_schedule_that_updates_within_the_step_has_nothing_to_skip(tmp_path):
    def own(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    with pipeline(schedule="pipedream_2bw", optimizer=own) as pipe:
        with pytest.raises(UsageError, match="an update cannot be skipped"):
            penstock.Trainer(pipe, None, loader(), steps=3, folder=tmp_path / "run", on_nan="skip")
        trainer = penstock.Trainer(pipe, None, poisoned(1), steps=3, folder=tmp_path / "run")
        with pytest.raises(NonFiniteError, match="The weights have changed within the step"):
            trainer.fit()


def scaled(tmp_path, batches, **asked):
    """Return a trainer of a pipeline with a gradient scaler, which the trainer is not told of."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    pipe = pipeline(scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    asked = {"steps": 3, "folder": tmp_path / "run", "view": False, **asked}
    return pipe, scaler, penstock.Trainer(pipe, optimizer, batches, **asked)


def test_the_pipelines_scaler_is_known(tmp_path):
    plain, optimizer = sequence(8), None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    batches = [tuple(data(8, seed=number)) for number in range(3)]
    for batch, target in batches:
        nn.functional.mse_loss(plain(batch), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    pipe, _, trainer = scaled(tmp_path, batches)
    with pipe:
        trainer.fit()
        for name, value in plain.state_dict().items():
            assert torch.allclose(pipe.state_dict()[name], value, rtol=1e-9), name
        with pytest.raises(UsageError, match="pass the pipeline's own scaler"):
            penstock.Trainer(
                pipe, torch.optim.SGD(pipe.parameters()), batches, steps=1, folder=tmp_path / "other",
                scaler=torch.amp.GradScaler("cpu"),
            )  # fmt: skip


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_scaler_goes_on_after_a_loss_that_is_not_finite(tmp_path, policy):
    pipe, _, trainer = scaled(tmp_path, poisoned(2), steps=4, on_nan=policy, checkpoint_every=1)
    with pipe, pytest.warns(UserWarning, match="not finite"):
        assert trainer.fit().is_done
    assert all(value.isfinite().all() for value in pipe.state_dict().values())


def test_ignoring_spoils_no_more_than_a_plain_loop_would(tmp_path):
    class Spoil(penstock.Callback):
        strict = True

        def on_pre_optimizer_step(self, trainer):
            assert all(p.grad.isfinite().all() for name, p in trainer.pipe.named_parameters() if name != "0.bias")

    model = sequence(4)
    model[0].bias.register_hook(lambda gradient: gradient * float("inf"))
    with pipeline(model) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        penstock.Trainer(
            pipe,
            optimizer,
            loader(),
            steps=1,
            folder=tmp_path / "run",
            on_nan="ignore",
            callbacks=[Spoil()],
            view=False,
        ).fit()


# ---- nothing is lost at the end


def test_a_validation_that_fails_loses_no_steps(tmp_path):
    trainer, pipe, _ = make(tmp_path / "run", validation=iter([]))
    with pipe, pytest.raises(UsageError, match="validation: has no batches"):
        trainer.fit()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000007"]


def test_what_cannot_be_saved_is_told_before_the_first_step(tmp_path):
    class Odd:
        def __init__(self):
            self.seen = {1, 2}

        def __call__(self, step):
            return 1.0

    with pipeline() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, Odd())
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(UsageError, match="scheduler"):
            penstock.Trainer(pipe, optimizer, loader(), steps=3, folder=tmp_path / "run", scheduler=rate).fit()
        assert all(torch.equal(before[name], value) for name, value in pipe.state_dict().items())


def test_a_disk_that_is_full_for_pages_and_faults_ends_nothing(tmp_path):
    """A file where the folder of timelines would be, and a folder where the faults would."""
    (tmp_path / "run" / "faults.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "timelines").write_text("")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        summary, _, _ = train(tmp_path / "run", batches=poisoned(1, 9), on_nan="skip", record_every=2, steps=5)
    assert summary.is_done
    assert summary.timelines == ()
    texts = [str(one.message) for one in told]
    assert any("the timeline of step 2 was not written" in text for text in texts)
    assert any("faults.jsonl cannot be written" in text for text in texts)


# ---- items


class Losing(nn.Module):
    """Knows its loss."""

    def __init__(self):
        super().__init__()
        self.body = sequence(4)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.body(x), y)


def test_two_tensors_of_a_model_that_knows_its_loss_are_one_batch(tmp_path):
    x, y = data(8)
    with pipeline(Losing(), example=(x, y), loss=None) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        trainer = penstock.Trainer(
            pipe, optimizer, [(x, y)] * 3, steps=3, folder=tmp_path / "run", validation=[(x, y)], view=False
        )
        summary = trainer.fit()
        assert summary.validation < Losing()(x, y).item()


def test_tokens_are_counted_in_what_the_loop_is_handed(tmp_path):
    x, y = data(8)
    found = []

    class Seen(penstock.Callback):
        def on_step_end(self, trainer, reading):
            found.append((reading.num_tokens, reading.num_samples))

    with pipeline(Losing(), example={"x": x, "y": y}, loss=None) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        penstock.Trainer(
            pipe, optimizer, [{"x": x, "y": y}] * 2, steps=2, folder=tmp_path / "run", callbacks=[Seen()],
            count_tokens=lambda item: item["x"].numel(), view=False,
        ).fit()  # fmt: skip
    assert found == [(8 * WIDTH, 8)] * 2


def test_the_rate_that_is_told_is_the_one_that_was_used(tmp_path):
    rates = []

    class Seen(penstock.Callback):
        def on_step_end(self, trainer, reading):
            rates.append(reading.lr)

    with pipeline() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        penstock.Trainer(
            pipe, optimizer, loader(), steps=3, folder=tmp_path / "run", scheduler=rate, callbacks=[Seen()], view=False
        ).fit()
    assert [value for (value,) in rates] == pytest.approx([1.0, 0.1, 0.01])


def test_a_rate_that_follows_validations(tmp_path):
    with pipeline() as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        rate = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.999999)
        asked = {"steps": 5, "folder": tmp_path / "run", "scheduler": rate, "view": False}
        with pytest.raises(UsageError, match="ReduceLROnPlateau needs validation losses"):
            penstock.Trainer(pipe, optimizer, loader(), **asked)
        penstock.Trainer(pipe, optimizer, loader(), validation=loader(), validate_every=1, **asked).fit()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 2**4)
        with pytest.raises(UsageError, match="LBFGS"):
            penstock.Trainer(pipe, torch.optim.LBFGS(pipe.parameters()), loader(), steps=1, folder=tmp_path / "other")


@pytest.mark.parametrize("at", [2, 4])
def test_a_validation_that_draws_changes_nothing_on_resume(tmp_path, at):
    """A validation loader draws a seed from the same generator; one that was missed is made up for."""
    asked = {"validate_every": 2, "batches": loader(own=False)}
    _, losses, _ = train(tmp_path / "whole", validation=loader(16, own=False), **asked)
    _, begun, _ = train(tmp_path / "run", validation=loader(16, own=False), callbacks=[StopAt(at)], **asked)
    _, rest, _ = train(tmp_path / "run", validation=loader(16, own=False), seed=9, **asked)
    assert begun | rest == pytest.approx(losses, rel=1e-10)


# ---- folders


def test_stop_is_for_one_training(tmp_path):
    trainer, pipe, _ = make(tmp_path / "run", callbacks=[StopAt(2)])
    with pipe:
        assert trainer.fit().status == "stopped"
        assert trainer.fit().status == "done"


def test_where_it_begins_is_not_where_it_goes_back_to(tmp_path):
    train(tmp_path / "first", callbacks=[StopAt(2)])
    begin = tmp_path / "first" / "checkpoint-000002"
    summary, _, _ = train(tmp_path / "run", resume=begin, callbacks=[StopAt(4)])
    assert (summary.resumed_from, summary.step) == (2, 4)
    summary, losses, _ = train(tmp_path / "run", resume=begin)
    assert (summary.resumed_from, sorted(losses)) == (4, [5, 6, 7])


def test_what_was_asked_for_is_for_the_first_start(tmp_path, monkeypatch):
    train(tmp_path / "run", resume="never", callbacks=[StopAt(3)])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(tmp_path / "run", resume="never")[0].resumed_from == 3


def test_a_folder_stays_where_it_was_when_the_user_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    class Wander(penstock.Callback):
        def on_step_end(self, trainer, reading):
            os.chdir(tmp_path / "there")

    summary, _, _ = train("run", checkpoint_every=2, callbacks=[Wander()])
    assert not summary.failures
    assert not list((tmp_path / "there").iterdir())
    assert (tmp_path / "here" / "run" / "checkpoint-000007").is_dir()


def test_data_workers_do_not_hold_the_folder(tmp_path):
    batches = DataLoader(TensorDataset(*data(24)), batch_size=8, num_workers=1, persistent_workers=True)
    assert train(tmp_path / "run", batches=batches, steps=2)[0].is_done
    assert train(tmp_path / "run", batches=batches, steps=4)[0].is_done


def test_a_training_that_was_killed_leaves_the_folder_though_its_data_workers_live(tmp_path):
    script = (
        "import os, signal, penstock\nfrom training_runs import train\nfrom pipelines import data\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "class Kill(penstock.Callback):\n"
        "    def on_step_end(self, trainer, reading):\n"
        "        if reading.step == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "batches = DataLoader(TensorDataset(*data(24)), batch_size=8, num_workers=1)\n"
        f"train({str(tmp_path / 'run')!r}, batches=batches, callbacks=[Kill()], checkpoint_every=1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd="tests", check=False)
    assert ended.returncode == -signal.SIGKILL
    assert train(tmp_path / "run", batches=loader(own=False))[0].is_done


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(lock, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"):
        assert train(tmp_path / "run", steps=1)[0].is_done


# ---- what a checkpoint brings along


def test_settings_of_the_checkpoint_win_and_are_told(tmp_path):
    train(tmp_path / "run", steps=2)
    with pipeline() as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=5.0, weight_decay=0.5)
        trainer = penstock.Trainer(
            pipe, optimizer, loader(), steps=4, folder=tmp_path / "run", view=False,
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        )  # fmt: skip
        with pytest.warns(UserWarning, match=r"settings of the checkpoint: .*lr 0.05, not 5.0.*weight_decay 0.01, not"):
            trainer.fit()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_momentum_that_a_schedule_moves_is_no_setting(tmp_path, kind):
    for steps, more in ((3, {}), (6, {}), (8, {"weight_decay": 0.5})):
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {"betas": (0.9, 0.95)}
        with pipeline() as pipe:
            optimizer = kind(pipe.parameters(), lr=0.01, **options, **more)
            trainer = penstock.Trainer(
                pipe, optimizer, loader(), steps=steps, folder=tmp_path / "run", view=False,
                scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20),
            )  # fmt: skip
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                trainer.fit()
        about = [str(one.message) for one in told if "settings of the checkpoint" in str(one.message)]
        assert len(about) == bool(more)
        assert all("weight_decay" in words and "betas" not in words and "momentum" not in words for words in about)


def test_a_momentum_that_no_schedule_moves_any_more_is_told(tmp_path):
    for steps in (3, 6):
        with pipeline() as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
            trainer = penstock.Trainer(
                pipe, optimizer, loader(), steps=steps, folder=tmp_path / "run", view=False,
                scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=20) if steps == 3 else None,
            )  # fmt: skip
            with nullcontext() if steps == 3 else pytest.warns(UserWarning, match=r"momentum 0\.\d+, not 0\.9"):
                trainer.fit()


def test_batches_of_another_size_begin_an_epoch_anew(tmp_path):
    train(tmp_path / "run", batches=loader(24, 4), callbacks=[StopAt(5)])
    with pytest.raises(CheckpointError, match=r"the state is from an epoch of 5 batches or more.*resume_data=False"):
        train(tmp_path / "run", batches=loader(24, 8))
    summary, losses, _ = train(tmp_path / "run", batches=loader(24, 8), resume_data=False)
    assert (summary.resumed_from, sorted(losses)) == (5, [6, 7])


def test_a_damaged_checkpoint_is_written_down(tmp_path):
    train(tmp_path / "run", steps=4, checkpoint_every=2)
    path = sorted((tmp_path / "run" / "checkpoint-000004").glob("model-*"))[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="went back to the checkpoint of step 2"):
        summary, _, _ = train(tmp_path / "run", steps=6)
    assert summary.resumed_from == 2
    fault = json.loads((tmp_path / "run" / "faults.jsonl").read_text().splitlines()[0])
    assert [folder.name for folder in summary.checkpoints][-1] == "checkpoint-000006"
    assert fault["kind"] == "damaged checkpoint"
    assert path.name in fault["message"]


def test_a_damaged_checkpoint_does_not_push_a_good_one_out(tmp_path):
    train(tmp_path / "run", steps=6, checkpoint_every=2, keep_checkpoints=3)
    path = sorted((tmp_path / "run" / "checkpoint-000006").glob("model-*"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="went back to the checkpoint of step 4"):
        train(tmp_path / "run", steps=7, keep_checkpoints=3)
    left = sorted(folder.name for folder in (tmp_path / "run").glob("checkpoint-*"))
    assert left == [f"checkpoint-00000{step}" for step in (2, 4, 6, 7)]
    train(tmp_path / "run", steps=9, checkpoint_every=1, keep_checkpoints=3)
    left = sorted(folder.name for folder in (tmp_path / "run").glob("checkpoint-*"))
    assert left == [f"checkpoint-00000{step}" for step in (7, 8, 9)]


def test_a_page_has_the_predicted_step_beside_the_measured(tmp_path):
    summary, _, _ = train(tmp_path / "run", steps=2)
    assert "measured" in summary.timelines[0].read_text()
    assert "predicted" in summary.timelines[0].read_text()
