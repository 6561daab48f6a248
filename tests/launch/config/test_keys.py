"""Keys of penstock train that decide what a step computes: a real training with each has the plain model's losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli.main import app

STEPS, BATCH, WIDTH = 3, 8, 8
FILE = """
steps = 3
lanes = 2
micro_batches = 4
precision = "fp64"
optimizer = "SGD"
lr = 0.1
log_every = 1
check = false
callbacks = ["keys_of_tests:Ended"]
model = "keys_of_tests:model"
data = "keys_of_tests:data"
loss = "mse_loss"
"""
OWN = f"""
import torch
from torch import nn
import penstock

SEEN = {{}}


class Ended(penstock.Callback):
    def on_step_end(self, trainer, reading):
        SEEN["samples"] = reading.num_samples

    def on_train_end(self, trainer, summary):
        SEEN["state"] = {{name: tensor.clone() for name, tensor in trainer.pipe.state_dict().items()}}


class Model(nn.Module):
    def __init__(self, has_norm=False):
        super().__init__()
        self.first, self.second = nn.Linear({WIDTH}, {WIDTH}), nn.Linear({WIDTH}, {WIDTH})
        self.norm = nn.BatchNorm1d({WIDTH}) if has_norm else nn.Identity()

    def forward(self, x, scale=None):
        SEEN["calls"] = SEEN.get("calls", 0) + 1
        x = self.norm(x)
        x = self.first(x if scale is None else x * scale)
        return self.second(x.tanh() + x.mean(0 if x.dim() == 3 else -1, keepdim=True))


def model(has_norm=False):
    torch.manual_seed(0)
    return Model(has_norm)


def data(kind="rows"):
    drawn = torch.Generator().manual_seed(1)
    shape = (6, {BATCH}, {WIDTH}) if kind == "time first" else ({BATCH}, {WIDTH})
    made = [[torch.randn(shape, generator=drawn) for _ in range(2)] for _ in range({STEPS})]
    if kind == "scaled":
        scale = torch.randn({WIDTH}, generator=drawn)
        return [({{"x": x, "scale": scale}}, y) for x, y in made]
    return [(x, y) for x, y in made]


def total(output, target):
    return (output - target).square().sum()


def masked(output, target):
    return ((output - target).square() * (target > 0)).sum() / (target > 0).sum()


def weight(batch, target):
    return (target > 0).sum()


def spread(output, target):
    return (output - target).square().mean().sqrt()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Be in a folder with a configuration; return the module of the user's that it names."""
    monkeypatch.chdir(tmp_path)
    Path("keys_of_tests.py").write_text(OWN)
    Path("run.toml").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("keys_of_tests")
    sys.modules.pop("keys_of_tests")


def train(*words):
    """Run `penstock train`; return its losses, or what it says where it refuses."""
    folder = Path(f"run-{len(list(Path.cwd().glob('run-*')))}")
    result = CliRunner().invoke(app, ["train", "run.toml", "--folder", str(folder), *words])
    if result.exit_code:
        return result.output
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "log"]


def plain(own, loss=torch.nn.functional.mse_loss, kind="rows", **model_args):
    """Return the losses of a plain training loop, and the model."""
    model = own.model(**model_args).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch, target in own.data(kind):
        given = {name: t.double() for name, t in (batch if isinstance(batch, dict) else {"x": batch}).items()}
        made = loss(model(**given), target.double())
        optimizer.zero_grad()
        made.backward()
        optimizer.step()
        losses.append(made.item())
    return losses, model


def differs(found, wanted):
    return isinstance(found, str) or not torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-9)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("masked", ["--weight", "keys_of_tests:weight"]),
        ("total", ["--weight", "sum"]),
        ("spread", ["--loss-over", "batch"]),
    ],
)
def test_what_the_loss_counts(own, loss, words):
    """There were no such keys: in Python such losses were exact, with penstock train they could not be."""
    wanted, _ = plain(own, getattr(own, loss))
    assert train("--loss", f"keys_of_tests:{loss}", *words) == pytest.approx(wanted, rel=1e-12)
    assert differs(train("--loss", f"keys_of_tests:{loss}"), wanted)


@pytest.mark.parametrize("dim", ["1", "x=1"])
def test_batch_dim(own, dim):
    """With the batch on dimension 1 the samples of a step were counted, and validation weighed, along dimension 0."""
    words = ["--data-args", "kind='time first'"]
    wanted, _ = plain(own, kind="time first")
    assert train(*words, "--batch-dim", dim) == pytest.approx(wanted, rel=1e-12)
    assert own.SEEN["samples"] == BATCH
    assert differs(train(*words), wanted)


def test_whole(own):
    words = ["--data-args", "kind=scaled"]
    wanted, _ = plain(own, kind="scaled")
    assert train(*words, "--whole", "scale") == pytest.approx(wanted, rel=1e-12)
    assert differs(train(*words), wanted)


def test_deferred_batch_norm(own):
    words = ["--model-args", "has_norm=true"]
    _, model = plain(own, has_norm=True)
    wanted = model.state_dict()
    for is_deferred, more in ((True, ["--deferred-batch-norm"]), (False, [])):
        assert len(train(*words, *more)) == STEPS
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
            assert torch.allclose(own.SEEN["state"][name], wanted[name], rtol=1e-9) == is_deferred, name


@pytest.mark.parametrize("path", ["replay", "export"])
def test_capture_path(own, path):
    """Replay runs the user's own code for every micro-batch on both stages; export runs what it recorded."""
    wanted, _ = plain(own)
    own.SEEN["calls"] = 0
    assert train("--capture-path", path, "--cuts", "second") == pytest.approx(wanted, rel=1e-12)
    assert (own.SEEN["calls"] >= STEPS * 4 * 2) == (path == "replay"), own.SEEN["calls"]


def test_a_dry_run_knows_where_the_batch_is_and_how_to_capture(own):
    words = ["--data-args", "kind='time first'", "--batch-dim", "1", "--capture-path", "replay", "--dry-run", "--json"]
    result = CliRunner().invoke(app, ["train", "run.toml", *words])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert found["profile"]["batch_size"] == BATCH // 4
    assert found["capture"]["path"] == "replay"
