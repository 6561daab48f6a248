"""penstock train in one process: what it prints, writes and returns; and what it says to wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import commands
from terminals import in_terminal, plain

SMALL = """
steps = 4
log_every = 1
micro_batches = 4
clip = 1.0
checkpoint_every = 2
model_args = {width = 16, depth = 1, heads = 2, length = 8}
data_args = {batch_size = 4, length = 8}
"""
OWN = """
import torch
from torch import nn
import penstock


class Model(nn.Module):
    def __init__(self, width=8, fails=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ArithmeticError("the model does not like it")
        return self.last(torch.tanh(self.first(x)))


def data(batches=6, fails_at=None):
    class Data:
        def __iter__(self):
            drawn = torch.Generator().manual_seed(1)
            for number in range(batches):
                if number == fails_at:
                    raise LookupError("sample 7 is broken")
                x = torch.randn(8, 4, generator=drawn)
                yield x, x.sum(1, keepdim=True)

    return Data()


def both():
    return data(), data(2)


def optimizer(parameters, lr, momentum=0.0):
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def rate(optimizer, steps):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)


class Told(penstock.Callback):
    def on_train_end(self, trainer, summary):
        (trainer.folder.path / "told").write_text(summary.status)


def number():
    return 3


def nothing():
    data()


def half():
    return None, data()


def untested():
    return data(), None


def dicts():
    return [{"x": x, "y": y} for x, y in data()]


def wide():
    return [(torch.cat([x, x], 1), y) for x, y in data()]


def whole():
    return [(x.long(), y) for x, y in data()]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Be in a folder with a small configuration and code of one's own."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(SMALL)
    Path("own_of_tests.py").write_text(OWN)
    return tmp_path


def train(*words):
    return commands.penstock("train", *words)


def test_a_model_that_knows_its_loss_takes_items_of_two_tensors_whole(place):
    Path("knows.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)\n\n"
        "    def forward(self, x, y):\n"
        "        return nn.functional.mse_loss(self.last(torch.tanh(self.first(x))), y)\n\n\n"
        "def data():\n"
        "    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))\n"
        "    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)\n"
    )
    words = ("--model", "knows.py:Model", "--data", "knows.py:data", "--loss", "model", "--steps", 12, "--lr", "0.05")
    code, _, err = train(*words, "--micro-batches", 4, "--log-every", 1)
    assert (code, err) == (0, "")
    assert losses("run")[12] < losses("run")[4]  # the same batch, two epochs later


def test_a_terminal_has_one_picture_at_a_time(place):
    """What is shown before the first step makes way for the view: two at once would print each other's signs."""
    code, out = in_terminal("train", "run.toml", "--record-every", 2)
    assert code == 0
    shown = plain(out)
    for words in ("tokens/s", "lanes in step 2", "4/4 steps", "checkpoint run/checkpoint-000004", "Done: 4 of 4 steps"):
        assert words in shown
    assert not re.search(r"\[[\d;]+m", shown)
    assert shown.count("\nDone: ") == 1


def losses(folder):
    events = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["loss"] for event in events if event["event"] == "log"}


OWN_WORDS = ("--model", "own_of_tests.py:Model", "--data", "own_of_tests.py:data", "--loss", "mse_loss")


def test_it_trains_and_its_folder_tells_all(place, monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_TESTS", "canary-7f3a")
    code, out, err = train("run.toml", "--folder", "out", "--lr", "0.01")
    assert (code, err) == (0, "")
    assert "Done: 4 of 4 steps" in out
    folder = Path("out")
    assert {path.name for path in folder.iterdir()} >= {
        "config.toml", "plan.json", "schedule.csv", "environment.json", "events.jsonl", "latest", "checkpoint-000004",
    }  # fmt: skip
    plan = json.loads((folder / "plan.json").read_text())
    assert (plan["lanes"], plan["micro_batches"], plan["schedule"]) == (2, 4, "1f1b")
    assert json.loads((folder / "environment.json").read_text())["devices"][0].startswith("cpu: ")
    assert "lr = 0.01  # --lr" in (folder / "config.toml").read_text()
    assert "micro_batches = 4  # run.toml:4" in (folder / "config.toml").read_text()
    for path in folder.rglob("*"):  # no secret of the environment is in any file
        assert not path.is_file() or b"canary-7f3a" not in path.read_bytes(), path
    # the resolved file is a configuration: with more steps it goes on
    code, out, _ = train("out/config.toml", "--steps", "6")
    assert code == 0
    assert "continues from the checkpoint of step 4" in out
    assert "cuts from out/plan.json" in out
    assert json.loads((folder / "plan.json").read_text())["cuts"] == plan["cuts"]
    assert sorted(losses("out")) == [1, 2, 3, 4, 5, 6]
    # and the same in one go
    assert train("run.toml", "--folder", "whole", "--lr", "0.01", "--steps", "6", "--json")[0] == 0
    assert losses("whole") == pytest.approx(losses("out"), rel=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "words",
    [
        ("--optimizer", "sgd", "--optimizer-args", "momentum=0.9", "--lr-schedule", "cosine", "--warmup-steps", "1"),
        ("--precision", "bf16", "--lr-schedule", "one_cycle", "--schedule", "zb_h1"),
        ("--precision", "fp16", "--accumulate", "2"),
        ("--precision", "fp64", "--keep", "recompute", "--lr-schedule", "linear", "--lanes", "1"),
        ("--schedule", "interleaved_1f1b", "--stages-per-lane", "2", "--devices", "cpu,cpu"),
    ],
)  # fmt: skip
def test_ways_to_learn(place, words):
    code, out, err = train("run.toml", "--json", *words)
    assert code == 0, err
    assert json.loads(out)["status"] == "done"


def test_updates_within_the_step(place):
    text = SMALL.replace("clip = 1.0\n", "")
    Path("run.toml").write_text(text)
    code, out, err = train("run.toml", "--schedule", "pipedream_2bw", "--lr-schedule", "linear", "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 4


def test_code_of_ones_own(place):
    code, out, err = train(
        "--model", "own_of_tests.py:Model", "--model-args", "width=5", "--data", "own_of_tests.py:both",
        "--loss", "MSELoss", "--optimizer", "own_of_tests.py:optimizer", "--optimizer-args", "momentum=0.5",
        "--lr-schedule", "own_of_tests.py:rate", "--callbacks", "own_of_tests.py:Told", "--steps", "8", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["validation"] is not None
    assert Path("run/told").read_text() == "done"


def test_a_model_of_transformers(place):
    Path("conf.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}))
    words = ["--model-args", "vocab_size=100", "--model-args", "n_positions=8", "--model-args", "bos_token_id=1"]
    data = ["--data-args", "labels=true", "--data-args", "batch_size=4", "--data-args", "length=8"]
    code, out, err = train(
        "--model", "conf.json", *words, "--model-args", "eos_token_id=1", *data, "--steps", "2", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["loss"] == pytest.approx(4.6, abs=0.3)


def test_the_plan_without_a_device(place):
    code, out, err = train("run.toml", "--dry-run", "--analytic", "h100", "--lanes", "3", "--json")
    assert code == 0, err
    plan = json.loads(out)
    assert len(plan["lanes"]) == 3
    assert plan["step_seconds"] > 0
    assert not Path("run").exists()
    code, out, _ = train("run.toml", "--dry-run", "--analytic", "cpu")
    assert code == 0
    assert "predicted step" in out
    assert "memory: the fullest lane" in out


def test_what_is_asked_for_instead(place):
    code, out, _ = train("run.toml", "--print-config", "--nproc", "2")
    assert code == 0
    assert "nproc = 2  # --nproc" in out
    assert "steps = 4  # run.toml:2" in out
    assert train("--init", "new.toml")[0] == 0
    assert "# micro_batches = 8" in Path("new.toml").read_text()
    assert train("new.toml", "--print-config")[0] == 0
    code, _, err = train("--init", "new.toml")
    assert code == 2
    assert "new.toml exists already" in err
    code, out, _ = train("--help")
    assert code == 0
    assert "--micro-batches" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.toml",), "To write a first one: penstock train --init no.toml"),
        (("run.tmol",), "Did you mean run.toml? To write a first one: penstock train --init run.tmol"),
        (("runs/no.toml",), "runs/no.toml: there is no such file in "),
        (("--model", "own_of_tests.py", *OWN_WORDS[2:]), "own_of_tests.py:callable, such as own_of_tests.py:whole"),
        (("--data", "own_of_tests.py"), "it has Model, data, both, optimizer, rate, Told, number, nothing"),
        (("--model", "own_of_tests.py:Modle", *OWN_WORDS[2:]), "model: own_of_tests.py has no 'Modle'. Did you mean"),
        ((*OWN_WORDS, "--model-args", "widht=3"), "Did you mean 'width'?"),
        ((*OWN_WORDS, "--data-args", "batchs=3"), "Did you mean 'batches'?"),
        ((*OWN_WORDS, "--loss", "mse_los"), "loss: 'mse_los' is not a loss of torch.nn.functional or torch.nn."),
        ((*OWN_WORDS, "--optimizer", "AdmW"), "optimizer: 'AdmW' is not one of torch.optim. Did you mean 'AdamW'?"),
        ((*OWN_WORDS, "--optimizer-args", "betsa=3"), "Did you mean 'betas'?"),
        ((*OWN_WORDS, "--model", "own_of_tests.py:number"), "returned an int; it must return a model"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:number"), "returned int; it must return batches"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:nothing"), "data: own_of_tests.py:nothing returned NoneType (is a"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:half"), "returned (NoneType, Data); it must return batches"),
        ((*OWN_WORDS, "--validation", "own_of_tests.py:nothing"), "validation: own_of_tests.py:nothing returned NoneT"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:dicts"), "own_of_tests.py:dicts yields items of type dict, but loss"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:dicts"), "{x: float32 [8, 4], y: float32 [8, 1]}"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:wide"), "raises an error on the first batch of data (float32 [8, 8]"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:whole"), "error on the first batch of data (int64 [8, 4]): Runtime"),
        ((*OWN_WORDS, "--data", "own_of_tests.py:wide", "--dry-run", "--analytic", "cpu"), "(float32 [8, 8]): Runtime"),
        ((*OWN_WORDS, "--validate-every", "2"), "validate_every: there are no validation batches"),
        (("--model", "gtp2"), "no model 'gtp2': neither module:callable nor a model type of transformers. Did you"),
        (("--model", "gpt2", "--model-args", "n_layr=2"), "has no 'n_layr'. Did you mean 'n_layer'?"),
        (("--data-args", "length=0"), "length must be a whole number, 1 or more"),
        (("--analytic", "h100"), "--analytic only applies to --dry-run"),
    ],
)  # fmt: skip
def test_wrong_input_is_told_in_a_line(place, words, said):
    code, _, err = train(*words)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not Path("run").exists()


def test_what_user_code_raises_is_told_once_with_its_lines(place):
    code, _, err = train(*OWN_WORDS, "--data-args", "fails_at=2")
    assert code == 1
    assert err.count("Traceback") == 1
    assert "LookupError: sample 7 is broken" in err
    assert "own_of_tests.py" in err
    fault = [json.loads(line) for line in Path("run/faults.jsonl").read_text().splitlines()][-1]
    assert (fault["kind"], fault["code"], fault["step"]) == ("end", 1, 3)


def test_a_model_that_cannot_run_is_refused_before_the_first_step(place):
    code, _, err = train(*OWN_WORDS, "--model-args", "fails=true")
    assert code == 2
    assert re.search(
        r"ArithmeticError: the model does not like it at \S*own_of_tests.py:\d+; this also happens without a pipe", err
    )
    assert "Traceback" not in err


def test_one_interrupt_before_the_first_step_is_no_second_one(place, monkeypatch):
    Path("slow_of_tests.py").write_text("import signal\ndef model():\n    signal.raise_signal(signal.SIGINT)\n")
    words = ("--model", "slow_of_tests.py:model", *OWN_WORDS[2:])
    told = "Stopped by Ctrl-C before the first step: there is nothing to save.\n"
    code, _, err = train(*words)
    assert (code, err) == (130, told)
    monkeypatch.setenv("RANK", "1")  # of several processes the first says it
    code, _, err = train(*words)
    assert (code, err) == (130, "")


@pytest.mark.parametrize("rate", ["cosine", "one_cycle"])
def test_more_steps_stretch_the_curve_of_the_learning_rate(place, rate):
    words = (*OWN_WORDS, "--lr-schedule", rate, "--log-every", "1")
    assert train(*words, "--steps", "2")[0] == 0
    code, _, err = train(*words, "--steps", "6")
    assert code == 0, err
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    rates = [event["lr"] for event in events if event["event"] == "log"]
    assert len(rates) == 6
    assert rates[3] > rates[4] > rates[5] > 0


def test_data_may_say_that_there_is_no_validation(place):
    code, _, err = train(*OWN_WORDS, "--data", "own_of_tests.py:untested", "--steps", "1")
    assert (code, err) == (0, "")


def test_a_file_may_import_its_neighbours(place, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("parts").mkdir()
    Path("parts/neighbour_of_tests.py").write_text(OWN)
    Path("parts/importing_of_tests.py").write_text("from neighbour_of_tests import *\n")
    file = "parts/importing_of_tests.py"
    words = ("--model", f"{file}:Model", "--data", f"{file}:data", "--loss", "mse_loss")
    code, _, err = train(*words, "--steps", "1")
    assert code == 0, err
    assert str(place / "parts") in sys.path


def test_bad_checkpoints_have_a_code_of_their_own(place):
    assert train("run.toml")[0] == 0
    for path in Path("run").glob("checkpoint-*/MANIFEST.json"):
        path.write_text("{}")
    code, _, err = train("run.toml", "--steps", "8")
    assert code == 65, err
    assert "Traceback" not in err


def test_a_folder_is_for_one_training(place):
    from penstock.training.resume.run_folder import RunFolder

    with RunFolder("run", is_first=True):
        code, _, err = train("run.toml")
    assert code == 2
    assert "another training is running in this folder" in err


def test_the_command_itself(place):
    """Its real exit code, and how soon it says what is wrong."""
    command = [str(Path(sys.executable).parent / "penstock"), "train", "run.toml", "--stps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 2
    assert done.stderr == "Error: --stps: there is no such flag. Did you mean '--steps'?\n"
