"""What a training writes down: the journal, TensorBoard, and the memory of its lanes."""

import json
import math
import os
import resource
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import penstock
import processes
from penstock.errors import CheckpointError, UsageError
from penstock.launch.processes import train_process as running
from penstock.training.callbacks import tensorboard
from penstock.training.callbacks.callback import Reading, Summary
from penstock.training.callbacks.journal import Journal, JsonLines, plain_json
from penstock.training.callbacks.lane_memory import lane_bytes
from penstock.training.callbacks.tensorboard import TensorBoard
from pipelines import data, sequence
from training_runs import StopAt, loader, make, train


def events(folder):
    """Return the lines of a journal, read as strictly as any reader of JSON would."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    text = (folder / "events.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def fit(folder, *callbacks, **asked):
    trainer, pipe, _ = make(folder, callbacks=callbacks, **asked)
    with pipe:
        return trainer.fit()


def pretended(folder, **more):
    """Return what callbacks ask of a trainer, without one."""
    schedule = penstock.schedules.build("1f1b", lanes=2, micro_batches=4)
    pipe = SimpleNamespace(schedule=schedule, cuts=(3,), devices=[torch.device("cpu")] * 2)
    given = {"is_first": True, "step": 0, "reading": None, "options": SimpleNamespace(steps=10)} | more
    return SimpleNamespace(pipe=pipe, folder=SimpleNamespace(path=Path(folder)), **given)


# ---- the journal


def test_a_training_is_written_down_from_begin_to_end(tmp_path):
    fit(
        tmp_path, Journal(), steps=6, log_every=2, validation=loader(16), validate_every=3,
        checkpoint_every=4, record_every=5,
    )  # fmt: skip
    found = events(tmp_path)
    kinds = [line["event"] for line in found]
    assert (kinds[0], kinds[-1]) == ("train_begin", "train_end")
    assert {"log", "evaluate", "record", "save"} < set(kinds)
    assert all({"time", "event", "step", "attempt"} <= set(line) for line in found)
    assert {line["attempt"] for line in found} == {0}
    assert found[0]["plan"]["schedule"] == "1f1b"
    assert (found[0]["plan"]["lanes"], found[0]["steps"], found[0]["resumed_from"]) == (2, 6, None)
    assert len(found[0]["plan"]["cuts"]) == 1
    logs = [line for line in found if line["event"] == "log"]
    assert [line["step"] for line in logs] == [1, 2, 4, 6]
    assert all(line["loss"] > 0 and line["samples_per_second"] > 0 for line in logs)
    assert len(logs[-1]["lane_bytes"]) == 2
    assert [line["step"] for line in found if line["event"] == "evaluate"] == [3, 6]
    record = next(line for line in found if line["event"] == "record")
    assert (record["page"], record["step"]) == ("timelines/step-000005.html", 5)
    assert 0 <= record["bubble"] < 1
    assert {line["folder"] for line in found if line["event"] == "save"} == {"checkpoint-000004", "checkpoint-000006"}
    assert (found[-1]["status"], found[-1]["checkpoints"][-1]) == ("done", "checkpoint-000006")


def test_a_training_that_resumes_adds_to_the_file(tmp_path, monkeypatch):
    fit(tmp_path, Journal(), StopAt(3), steps=6)
    first = events(tmp_path)
    assert first[-1]["status"] == "stopped"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    fit(tmp_path, Journal(), steps=6)
    found = events(tmp_path)
    assert found[: len(first)] == first
    begin = found[len(first)]
    assert (begin["event"], begin["step"], begin["resumed_from"], begin["attempt"]) == ("train_begin", 3, 3, 2)
    assert found[len(first) + 1]["event"] == "recover"


def test_faults_are_written_down_with_what_is_not_a_number(tmp_path):
    journal, trainer = Journal(), pretended(tmp_path, step=4)
    journal.on_train_begin(trainer)
    journal.on_log(trainer, {"step": 4, "loss": math.nan, "lr": [0.1, math.inf], "norm": np.float32(-math.inf)})
    journal.on_fault(trainer, {"kind": "nonfinite", "step": 5, "message": "the loss is not finite", "time": "later"})
    journal.close()
    _, log, fault = events(tmp_path)
    assert (log["loss"], log["lr"], log["norm"]) == ("NaN", [0.1, "Infinity"], "-Infinity")
    assert math.isnan(float(log["loss"]))
    assert (fault["event"], fault["kind"], fault["step"]) == ("fault", "nonfinite", 5)
    assert fault["time"] > 1e9


def test_others_than_the_first_process_write_nothing(tmp_path):
    journal, trainer = Journal(), pretended(tmp_path, is_first=False)
    journal.on_train_begin(trainer)
    journal.on_log(trainer, {"loss": 1.0})
    journal.on_train_end(trainer, Summary("done", 1, 1, 1.0, None, 1.0, tmp_path))
    assert not list(tmp_path.iterdir())


def test_half_a_line_of_a_process_that_died_goes(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "los')
    lines = JsonLines(path)
    lines.append({"step": 3})
    lines.close()
    assert [line["step"] for line in events(tmp_path)] == [1, 3]
    path.write_text('{"step"')
    lines.append({"step": 4})
    lines.close()
    assert [line["step"] for line in events(tmp_path)] == [4]


@contextmanager
def files_of_at_most(size):
    """Let no file grow beyond a size: what a full disk does to a write, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_warned_about_once_and_costs_whole_lines(tmp_path):
    lines = JsonLines(tmp_path / "events.jsonl")
    lines.append({"step": 1})
    size = (tmp_path / "events.jsonl").stat().st_size
    long = {"step": 2, "message": "more than five characters"}
    with files_of_at_most(size + 5):
        with pytest.warns(UserWarning, match="training continues"):
            lines.append(long)
        lines.append(long)  # with no warning more, which would be an error here
        lines.append(long)
    lines.append({"step": 5})
    lines.append({"step": 6})
    lines.close()
    assert events(tmp_path) == [{"step": 1}, {"step": 5, "lost": 3}, {"step": 6}]


def test_a_folder_that_is_gone_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    journal, trainer = Journal(), pretended(tmp_path / "file" / "run")
    with pytest.warns(UserWarning, match="cannot be written"):
        journal.on_train_begin(trainer)
    journal.on_log(trainer, {"loss": 1.0})
    journal.close()


def test_whatever_a_callback_is_told_can_be_written():
    told = {1: {np.int64(3)}, "b": (True, None, np.float64(0.5)), "c": torch.device("cpu"), "d": Path("x")}
    assert plain_json(told) == {"1": [3], "b": [True, None, 0.5], "c": "cpu", "d": "x"}


# ---- slow lanes


def test_a_slow_lane_is_written_down_once_when_two_steps_have_shown_it(tmp_path):
    schedule = penstock.schedules.build("1f1b", lanes=3, micro_batches=4)
    even = penstock.simulate(schedule, penstock.Costs(forward=1.0, backward=2.0))
    slow = penstock.simulate(schedule, penstock.Costs(forward=[1.0, 2.0, 1.0], backward=[2.0, 4.0, 2.0]))
    journal, trainer = Journal(), pretended(tmp_path)
    journal.on_train_begin(trainer)
    for step, timeline in enumerate([slow, even, slow, slow, slow], 1):
        trainer.step = step
        trainer.reading = Reading(step, 10, 0, 1.0, 1.0, (0.1,), 0.1, 8, timeline=timeline)
        journal.on_record(trainer, tmp_path / "timelines" / f"{step}.html")
    journal.close()
    told = [line for line in events(tmp_path) if line["event"] == "slow_lane"]
    assert [line["step"] for line in told] == [4]
    assert "lane 1 takes 2.0 times as long as the others" in told[0]["message"]


# ---- TensorBoard


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {name: {event.step: event.value for event in read.Scalars(name)} for name in read.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages that TensorBoard is made of
def test_tensorboard_gets_the_figures(tmp_path):
    asked = {"log_every": 2, "validation": loader(16), "record_every": 2}
    fit(tmp_path, TensorBoard(), Journal(), StopAt(3), steps=6, **asked)
    fit(tmp_path, TensorBoard(), Journal(), steps=6, **asked)
    found = scalars(tmp_path / "tensorboard")
    logs = {line["step"]: line for line in events(tmp_path) if line["event"] == "log"}
    assert found["train/loss"] == pytest.approx({step: line["loss"] for step, line in logs.items()})
    assert set(found["train/loss"]) == {1, 2, 4, 6}
    assert {
        "train/lr", "speed/samples_per_second", "speed/step_seconds", "pipeline/bubble", "memory/lane_0",
        "memory/lane_1", "validation/loss",
    } <= set(found)  # fmt: skip


def test_tensorboard_that_is_not_there_gets_a_message(monkeypatch):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'penstock\[tensorboard\]'"):
        TensorBoard()


# ---- memory


def small_pipe(model):
    return penstock.Pipeline(
        model, example=data(8)[0], loss=torch.nn.functional.mse_loss, lanes=2, micro_batches=4, analytic="h100",
        timeout=30,
    )  # fmt: skip


def test_lanes_that_are_threads_hold_their_weights_gradients_states_and_saved_values():
    with small_pipe(sequence(8)) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        total = sum(parameter.nbytes for parameter in pipe.parameters())
        assert sum(lane_bytes(pipe)) == 2 * total
        with pipe.record() as recording:
            pipe.step(*data(8))
        optimizer.step()
        held = lane_bytes(pipe, optimizers=[optimizer])
        counters = 4 * sum(1 for _ in pipe.parameters())  # AdamW counts steps for each parameter
        assert sum(held) == 4 * total + counters
        assert min(held) > 0
        more = lane_bytes(pipe, optimizers=[optimizer], timeline=recording.timeline)
        assert np.subtract(more, held).tolist() == pytest.approx(recording.timeline.peak_bytes)
        assert recording.timeline.peak_bytes[0] > 0


def held_by_processes():
    with small_pipe(sequence(8)) as pipe:
        pipe.step(*data(8))
        return lane_bytes(pipe), os.getpid()


def test_lanes_that_are_processes_hold_what_these_do_and_all_know():
    (first, one), (second, other) = processes.run(held_by_processes, 2)
    assert one != other
    assert first == second
    assert len(first) == 2
    assert all(10 * 2**20 < size < 100 * 2**30 for size in first)


def test_a_folder_of_another_models_run_says_what_to_do(tmp_path):
    """It named the parameters that differ, and left the reader alone with them."""
    train(tmp_path / "run", steps=1)
    with pytest.raises(
        CheckpointError, match=r"another model.*run contains the run of another.*choose another folder, or"
    ):
        train(tmp_path / "run", steps=1, model=sequence(6))


def test_a_message_of_megabytes_is_shortened_where_it_is_said(capsys):
    """An exception with a message of 3 MB made 12 MB of output."""
    running._report(ValueError("begin" + "x" * 3_000_000 + "end"), 1)
    said = capsys.readouterr().err
    assert len(said) < 21_000
    assert "ValueError: begin" in said
    assert "characters left out" in said
    assert said.endswith("xend\n")
