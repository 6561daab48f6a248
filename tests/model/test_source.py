"""Errors name the user's line, whichever way the model was captured; tests/wheel runs this in an installed Penstock."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import CaptureError, LaneError
from pipelines import WIDTH

ROWS = 4


class Lookup(nn.Module):
    """Fails for indices that its table does not have, in torch's own code."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(ROWS, WIDTH)

    def forward(self, x, rows):
        x = self.first(x).relu()
        return x + self.table(rows)  # the line of Lookup


class Region(nn.Module):
    """Fails within a region that torch.export keeps as a graph of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.ones(ROWS, WIDTH))

    def forward(self, x, rows):
        with torch.no_grad():
            taken = self.table.index_select(0, rows)  # the line of Region
        return self.first(x) + taken


class Inner(nn.Module):
    """Fails in the user's own code."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if x.abs().amax() > 1e6:
            raise ValueError("too large")  # the line of Inner
        return self.first(x)


def line(name):
    """Return where a comment marks a line of this file, as messages name it."""
    text = Path(__file__).read_text()
    at = next(n for n, words in enumerate(text.splitlines(), 1) if words.endswith(f"  # the line of {name}"))
    return f"test_source.py:{at}"


def named(error):
    """Return the line that a message names last, without its folder."""
    return re.findall(r"at (?:\S*/)?([\w.]+:\d+)", str(error))[-1]


def batch(rows):
    torch.manual_seed(0)
    return (torch.randn(8, WIDTH), torch.arange(8) % rows), torch.randn(8, WIDTH)


@pytest.mark.parametrize("path", ["export", "replay"])
def test_an_error_within_torch_names_the_line_of_the_model(path):
    """An installed Penstock named its own line; with export no line was named."""
    example, target = batch(ROWS)
    with penstock.Pipeline(
        Lookup(), example=example, loss=nn.functional.mse_loss, lanes=2, micro_batches=2, capture_path=path
    ) as pipe:
        pipe.step(example, target)
        with pytest.raises(LaneError, match="IndexError") as caught:
            pipe.step(batch(8)[0], target)
    assert named(caught.value) == line("Lookup")


def test_an_error_in_a_region_of_an_exported_graph_names_its_line():
    example, target = batch(ROWS)
    with penstock.Pipeline(
        Region(), example=example, loss=nn.functional.mse_loss, lanes=1, micro_batches=2, capture_path="export"
    ) as pipe, pytest.raises(LaneError) as caught:  # fmt: skip
        pipe.step(batch(8)[0], target)
    assert named(caught.value) == line("Region")


@pytest.mark.parametrize("model", [Inner, lambda: [Inner(), nn.Linear(WIDTH, WIDTH)]], ids=["replay", "modules"])
def test_an_error_of_the_users_own_names_its_line(model):
    (x, _), target = batch(ROWS)
    with penstock.Pipeline(
        model(), example=x, loss=nn.functional.mse_loss, lanes=2 if model is not Inner else 1, micro_batches=2
    ) as pipe:
        pipe.step(x, target)
        with pytest.raises(LaneError, match="too large") as caught:
            pipe.step(x * 1e9, target)
    assert named(caught.value) == line("Inner")


def test_an_error_of_the_loss_names_its_line():
    (x, _), target = batch(ROWS)

    def loss(output, target):
        return nn.functional.mse_loss(output, target[:, :1].view(1, -1, 7))  # the line of loss

    with penstock.Pipeline(
        nn.Linear(WIDTH, WIDTH), example=x, loss=loss, lanes=1, micro_batches=2, check=False
    ) as pipe, pytest.raises(LaneError) as caught:  # fmt: skip
        pipe.step(x, target)
    assert named(caught.value) == line("loss")


def test_a_model_that_cannot_be_captured_is_refused_with_its_line():
    with pytest.raises(CaptureError) as caught:
        penstock.Pipeline(Inner(), example=torch.full((8, WIDTH), 1e9), loss=nn.functional.mse_loss, micro_batches=2)
    assert named(caught.value) == line("Inner")
