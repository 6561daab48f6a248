"""The Trainer of transformers on a pipeline: the same losses, norms, metrics and weights as with the plain model."""

import contextlib
import copy
import io
import json
import os

import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

import penstock
from huggingface_cases import (
    arguments,
    as_under_torchrun,
    bert,
    collate,
    common_folder,
    figures,
    gpt2,
    labelled,
    llama,
    texts,
)
from penstock.errors import UsageError
from penstock.integrations.huggingface import PipelineTrainer
from penstock.integrations.one_process import as_one_process, without_torchrun
from runtime_everywhere import everywhere, pipeline, together


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def right(given):
    """Return the share of words that are predicted."""
    wanted = given.label_ids[:, 1:]
    return {"right": float((given.predictions[:, :-1].argmax(-1) == wanted)[wanted != -100].mean())}


def plain(model, folder, rows, **more):
    """Train with the Trainer itself, as a single process."""
    options = {key: more.pop(key) for key in ("eval_dataset", "compute_metrics") if key in more}
    args = arguments(folder, **more)
    with quiet(), without_torchrun(), as_one_process(args, is_first=True):
        trainer = Trainer(model, args, train_dataset=rows, data_collator=collate, **options)
        trainer.train()
    return trainer


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def piped(model, folder, rows, *, resume=None, lanes=2, callbacks=(), weights=None, **more):
    """Train with a pipeline; return the trainer."""
    options = {key: more.pop(key) for key in ("eval_dataset", "compute_metrics") if key in more}
    if weights is None:
        pipe = small_pipeline(model, rows, lanes=lanes)
    else:
        example = collate(rows[:4])
        pipe = penstock.Pipeline(model, example=example, weights=weights, lanes=lanes, micro_batches=2, timeout=20)
    with pipe, as_under_torchrun():
        trainer = PipelineTrainer(
            pipe, arguments(folder, **more), train_dataset=rows, data_collator=collate, callbacks=list(callbacks),
            **options,
        )  # fmt: skip
        with quiet():
            trainer.train(resume_from_checkpoint=resume)
            trainer.save_model(f"{folder}/final")
    return trainer


def small_pipeline(model, rows, lanes=2):
    return pipeline(model, collate(rows[:4]), lanes=lanes, micro_batches=2, path="replay")


def same_weights(folder, model):
    back = type(model).from_pretrained(folder)
    for (name, ours), theirs in zip(back.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.slow
@everywhere
def test_a_training_equals_that_of_the_plain_model():
    """With padding, an accumulation that the last update lacks, a scheduler, decay, clipping, evaluation, a metric."""
    for make in (gpt2, llama):
        with common_folder() as folder:
            equals_the_plain_model(make, folder)


def equals_the_plain_model(make, folder):
    rows, model = texts(), make()
    reference = copy.deepcopy(model)
    more = {"eval_dataset": rows[:7], "eval_strategy": "steps", "eval_steps": 3, "compute_metrics": right}
    wanted = plain(reference, folder / "plain", rows, **more)
    found = piped(model, folder, rows, **more)
    for name in ("loss", "eval_loss", "eval_right"):
        assert figures(found, name)
        assert figures(found, name) == pytest.approx(figures(wanted, name), rel=1e-6, abs=1e-6), (make, name)
    assert figures(found, "grad_norm") == pytest.approx(figures(wanted, "grad_norm"), rel=1e-4)
    assert figures(found, "learning_rate") == figures(wanted, "learning_rate")
    same_weights(folder / "final", reference)


@pytest.mark.slow
@everywhere
def test_a_class_that_ignores_the_number_of_labels_is_right_with_accumulation():
    """The Trainer adds the losses of its batches up: twice the loss of an equal batch without accumulation."""
    rows, once = labelled(), {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    with common_folder() as folder:
        whole = plain(bert(), folder / "whole", rows, **once)
        summed = plain(bert(), folder / "summed", rows, max_steps=1)
        assert figures(summed, "loss")[0] == pytest.approx(2 * figures(whole, "loss")[0], rel=1e-5)
        for more in (once, {}):
            found = piped(bert(), folder, rows, **more)
            assert figures(found, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-6)
            assert figures(found, "grad_norm") == pytest.approx(figures(whole, "grad_norm"), rel=1e-5)


class Stop(TrainerCallback):
    """Stops after a number of steps."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


@pytest.mark.slow
@everywhere
def test_a_training_resumes_where_it_stopped():
    rows, more = texts(), {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    with common_folder() as folder:
        whole = piped(gpt2(), folder / "whole", rows)
        first = piped(gpt2(), folder / "run", rows, callbacks=[Stop()], **more)
        assert len(figures(first, "loss")) == 3
        assert {path.name for path in (folder / "run").glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
        rest = piped(gpt2(), folder / "run", rows, resume=True, **more)
        assert figures(rest, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-6)
        state = json.loads((folder / "run" / "checkpoint-8" / "trainer_state.json").read_text())
        assert state["global_step"] == 8


def test_a_checkpoint_continues_on_another_number_of_lanes(tmp_path):
    rows = texts()
    whole = piped(gpt2(), tmp_path / "whole", rows)
    more = {"save_strategy": "steps", "save_steps": 3}
    piped(gpt2(), tmp_path / "run", rows, callbacks=[Stop()], **more)
    rest = piped(gpt2(), tmp_path / "run", rows, resume=True, lanes=3, **more)
    assert figures(rest, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-6)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    rows = texts()
    more = {
        "eval_dataset": rows[:7], "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    found = piped(gpt2(), tmp_path, rows, **more)
    assert found.state.best_model_checkpoint.endswith("checkpoint-2")  # the first one, since the loss falls
    best = gpt2().from_pretrained(found.state.best_model_checkpoint)
    last = gpt2().from_pretrained(tmp_path / "final")
    for ours, theirs in zip(last.parameters(), best.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@everywhere
def test_a_model_whose_lanes_read_their_own_weights():
    rows = texts()
    with common_folder() as folder:
        model = llama()
        if is_first():
            model.save_pretrained(folder / "start")
        together()
        wanted = plain(model, folder / "plain", rows)
        with torch.device("meta"):
            empty = llama()
        more = {"save_strategy": "steps", "save_steps": 8}
        found = piped(empty.train(), folder, rows, weights=folder / "start", **more)
        assert figures(found, "loss") == pytest.approx(figures(wanted, "loss"), rel=1e-6)
        same_weights(folder / "final", model)
        together()


def test_bf16_trains_like_the_plain_model_in_bf16(tmp_path):
    rows = texts()
    wanted = plain(gpt2(), tmp_path / "plain", rows, bf16=True)
    exact = plain(gpt2(), tmp_path / "exact", rows)
    found = piped(gpt2(), tmp_path, rows, bf16=True)
    assert figures(found, "loss") == pytest.approx(figures(wanted, "loss"), abs=0.03)
    assert figures(found, "loss")[0] != figures(exact, "loss")[0]  # it did run in bf16


def test_a_loss_of_the_user(tmp_path):
    """A pipeline with loss= gets the labels as its target."""

    def loss(output, labels):
        return torch.nn.functional.cross_entropy(output.logits, labels)

    rows, model = labelled(), bert()
    more = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    wanted = plain(bert(), tmp_path / "plain", rows, **more)
    example = collate(rows[:8])
    del example["labels"]
    with pipeline(model, example, loss=loss, micro_batches=2, path="replay") as pipe:
        trainer = PipelineTrainer(pipe, arguments(tmp_path, **more), train_dataset=rows, data_collator=collate)
        with quiet():
            trainer.train()
    assert figures(trainer, "loss") == pytest.approx(figures(wanted, "loss"), rel=2e-6)


@everywhere
def test_a_batch_without_labels_counts_nothing():
    """Also if it is the last of an update: the gradients of a tied parameter were then not added up."""
    rows = texts(8)
    rows[4:] = [{"input_ids": torch.tensor([3])}] * 4  # one word: nothing to predict
    more = {"num_train_epochs": 3, "train_sampling_strategy": "sequential"}
    with common_folder() as folder:
        wanted = plain(gpt2(), folder / "plain", rows, **more)
        found = piped(gpt2(), folder, rows, **more)
        assert len(figures(found, "loss")) == 3
        assert figures(found, "loss") == pytest.approx(figures(wanted, "loss"), rel=2e-6)
        assert figures(found, "grad_norm") == pytest.approx(figures(wanted, "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"gradient_checkpointing": True}, 'keep="recompute"'),
        ({"torch_compile": True}, "compile=True"),
        ({"label_smoothing_factor": 0.1, "neftune_noise_alpha": 1.0}, "label_smoothing_factor.*neftune|neftune.*label"),
        ({"bf16_full_eval": True}, "bf16=True"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(tmp_path, more, message):
    rows = texts(4)
    with small_pipeline(gpt2(), rows) as pipe, pytest.raises(UsageError, match=message):
        PipelineTrainer(pipe, arguments(tmp_path, **more), train_dataset=rows, data_collator=collate)


def test_other_objects_are_refused(tmp_path):
    with pytest.raises(UsageError, match="expected a penstock"):
        PipelineTrainer(gpt2(), arguments(tmp_path))
    x = torch.ones(4, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with (
        penstock.Pipeline(model, example=x, loss=torch.nn.MSELoss(), lanes=2) as pipe,
        pytest.raises(UsageError, match="not a model of transformers"),
    ):
        PipelineTrainer(pipe, arguments(tmp_path))
    rows = texts(4)
    with small_pipeline(gpt2(), rows) as pipe:
        with pytest.raises(UsageError, match="compute_loss_func: pass loss="):
            PipelineTrainer(pipe, arguments(tmp_path), compute_loss_func=right)
        trainer = PipelineTrainer(pipe, arguments(tmp_path), train_dataset=rows, data_collator=collate)
        with pytest.raises(Exception, match="checkpoint"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "nothing"))


def test_the_environment_of_torchrun_comes_back(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(KeyError), without_torchrun():
        os.environ["WORLD_SIZE"]
    assert os.environ["WORLD_SIZE"] == "2"
