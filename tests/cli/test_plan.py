"""penstock plan, and penstock train --plan."""

import json

import pytest

import penstock
from commands import penstock as run

MODEL = """
import torch
from torch import nn


def build(batch_size=8):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), torch.ones(batch_size, 8)
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    return f"{path}:build"


def test_plan_shows_and_writes(tmp_path, model):
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    said = run("plan", model, "--lanes", 2, "--micro-batches", 4, "--analytic", "h100", "--out", out, "--html", page)
    assert said.code == 0, said.err
    plan = penstock.Plan.from_json(out)
    assert (plan.lanes, plan.micro_batches, plan.cuts) == (2, 4, (4,))
    assert "predicted step" in said.out
    assert str(out) in said.out + said.err
    assert "<html" in page.read_text()[:500].lower()
    told = run("plan", model, "--lanes", 2, "--micro-batches", 4, "--analytic", "h100", "--json")
    assert penstock.Plan.from_json(json.dumps(json.loads(told.out))) == plan


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lanes", "0"], "lanes"),
        (["--schedule", "zb_h9"], "zb_h9"),
        (["--keep", "nothing"], "keep"),
        (["--keep", "fit"], "memory_limit"),
        (["--out", "/none/plan.json"], "/none/plan.json"),
        (["--analytic", "h101"], "h101"),
    ],
)
def test_wrong_input_gets_one_message(model, words, message):
    said = run("plan", model, *words)
    assert said.code == 2, said.out
    assert message in said.err
    assert "Traceback" not in said.err


def test_train_runs_a_plan(tmp_path):
    plan, settings = tmp_path / "plan.json", tmp_path / "run.toml"
    own = tmp_path / "own.py"
    own.write_text(
        MODEL.replace("batch_size=8", "").replace("torch.ones(batch_size, 8)", "torch.ones(8, 8)")
        + "\n\ndef model():\n    return build()[0]\n\n\n"
        + "def data():\n    return [(torch.ones(8, 8), torch.zeros(8, 8))] * 4\n"
    )
    assert run("plan", f"{own}:build", "--lanes", 2, "--cuts", "3", "--micro-batches", 4, "--out", plan).code == 0
    settings.write_text(
        f'model = "{own}:model"\ndata = "{own}:data"\nloss = "mse_loss"\nsteps = 3\nfolder = "{tmp_path / "run"}"\n'
    )
    said = run("train", settings, "--plan", plan, "--json")
    assert said.code == 0, said.err
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["cuts"] == [3]
    said = run("train", settings, "--plan", plan, "--schedule", "gpipe", "--folder", tmp_path / "other")
    assert said.code == 2
    assert "the plan has '1f1b'" in said.err
