"""penstock plan, and penstock train --plan."""

import json

import pytest

import penstock


def penstock_says(*words):
    import subprocess
    import sys

    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)], capture_output=True, text=True, check=False, timeout=240
    )


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
    said = penstock_says(
        "plan", model, "--lanes", 2, "--micro-batches", 4, "--analytic", "h100", "--out", out, "--html", page
    )
    assert said.returncode == 0, said.stderr
    plan = penstock.Plan.from_json(out)
    assert (plan.lanes, plan.micro_batches, plan.cuts) == (2, 4, (4,))
    assert "predicted step" in said.stdout
    assert str(out) in said.stdout + said.stderr
    assert "<html" in page.read_text()[:500].lower()
    told = penstock_says("plan", model, "--lanes", 2, "--micro-batches", 4, "--analytic", "h100", "--json")
    assert penstock.Plan.from_json(json.dumps(json.loads(told.stdout))) == plan


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
    said = penstock_says("plan", model, *words)
    assert said.returncode == 2, said.stdout
    assert message in said.stderr
    assert "Traceback" not in said.stderr


def test_train_runs_a_plan(tmp_path):
    plan, run = tmp_path / "plan.json", tmp_path / "run.toml"
    own = tmp_path / "own.py"
    own.write_text(
        MODEL.replace("batch_size=8", "").replace("torch.ones(batch_size, 8)", "torch.ones(8, 8)")
        + "\n\ndef model():\n    return build()[0]\n\n\n"
        + "def data():\n    return [(torch.ones(8, 8), torch.zeros(8, 8))] * 4\n"
    )
    assert (
        penstock_says(
            "plan", f"{own}:build", "--lanes", 2, "--cuts", "3", "--micro-batches", 4, "--out", plan
        ).returncode
        == 0
    )
    run.write_text(
        f'model = "{own}:model"\ndata = "{own}:data"\nloss = "mse_loss"\nsteps = 3\nfolder = "{tmp_path / "run"}"\n'
    )
    said = penstock_says("train", run, "--plan", plan, "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["cuts"] == [3]
    said = penstock_says("train", run, "--plan", plan, "--schedule", "gpipe", "--folder", tmp_path / "other")
    assert said.returncode == 2
    assert "the plan has '1f1b'" in said.stderr
