"""A model in one piece: it stays as it was, and what its nodes take is put right by what it takes."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from penstock.model.capture.capture import capture
from penstock.model.profiling import measure as measuring
from penstock.model.profiling.measure import measure, whole_seconds


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2).requires_grad_(False)
    )


@pytest.mark.parametrize("path", ["direct", "export", "replay"])
def test_the_model_stays_as_it_was(path):
    made = model()
    made[0].weight.grad = torch.full((8, 4), 3.0)
    captured = capture(made, torch.randn(6, 4), training=True, path=path)
    state = {name: value.clone() for name, value in made.state_dict().items()}
    torch.manual_seed(1)
    random.seed(1)
    draws = torch.get_rng_state(), random.getstate()
    forward, backward = whole_seconds(captured, batch_size=3, saved_bytes=0.0)
    assert forward > 0
    assert backward > 0
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1]
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert torch.equal(made[0].weight.grad, torch.full((8, 4), 3.0))
    assert made[4].weight.grad is None
    assert made.training


def test_where_memory_is_short_it_is_not_run(monkeypatch):
    captured = capture(model(), torch.randn(6, 4), training=True)
    assert whole_seconds(captured, batch_size=3, saved_bytes=1e18) is None
    monkeypatch.setattr(measuring, "_free_bytes", lambda: 0.0)
    assert whole_seconds(captured, batch_size=3, saved_bytes=0.0) is None


def test_there_is_memory_on_this_machine():
    assert 1 << 20 < measuring._free_bytes() < 1 << 60


def test_a_model_that_cannot_be_run_in_one_piece_does_without(monkeypatch):
    captured = capture(model(), torch.randn(6, 4), training=True)

    def split(cuts):
        raise RuntimeError("not in one piece")

    monkeypatch.setattr(captured, "split", split)
    assert whole_seconds(captured, batch_size=3, saved_bytes=0.0) is None
    assert measure(captured, batch_size=3, seconds_budget=0.01).forward.sum() > 0


@pytest.mark.parametrize(
    ("taken", "scales"),
    [
        (None, (1, 1)),
        ((6.0, 3.0), (2.0, 0.5)),  # parts: 3 and 6
        ((1e6, 1e-6), (3.0, 1 / 3)),  # within bounds
        ((0.0, 6.0), (1, 1)),
    ],
)
def test_nodes_take_together_what_the_model_takes(taken, scales):
    forward, inputs, weights = np.array([1.0, 2.0]), np.array([1.0, 1.0]), np.array([4.0, 0.0])
    found = measuring._scale_to_whole([forward, inputs, weights], taken)
    for column, before, scale in zip(found, (forward, inputs, weights), (scales[0], scales[1], scales[1]), strict=True):
        assert np.allclose(column, before * scale)


def test_a_profile_adds_up_to_the_model(monkeypatch):
    monkeypatch.setattr(measuring, "whole_seconds", lambda captured, **_: (2.0, 4.0))
    monkeypatch.setattr(measuring, "_MOST_SCALE", 1e12)
    profile = measure(capture(model(), torch.randn(6, 4), training=True), batch_size=3, seconds_budget=0.01)
    assert profile.forward.sum() == pytest.approx(2.0)
    assert profile.input_grad.sum() + profile.weight_grad.sum() == pytest.approx(4.0)
