"""What a step changes is put back: buffers of all kinds, those of the loss, and all random generators."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.faults.nonfinite import locate
from penstock.pipeline.state_snapshot import StateSnapshot
from pipelines import WIDTH, data


class Odd(nn.Module):
    """Has buffers that are changed in ways that torch does not count, or cannot change in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.norm = nn.BatchNorm1d(WIDTH).double()
        self.register_buffer("large", torch.zeros(200, 100))
        self.register_buffer("grows", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("repeated", torch.zeros(1, WIDTH, dtype=torch.float64).expand(4, WIDTH))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("bits", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))

    def forward(self, x):
        if self.training:
            self.large.data.add_(1.0)
            self.grows.data = torch.ones(len(self.grows) + 1)
            self.replaced = self.replaced + 1
            self.bits.logical_not_()
        return self.norm(self.linear(x)) + self.repeated[:1]


class Counting(nn.Module):
    """A loss with a buffer of its own, and draws from Python and numpy."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, target):
        self.calls += 1
        scale = 1 + random.random() + np.random.rand() + torch.rand(())
        return nn.functional.mse_loss(output, target) * scale


def state(pipe, loss):
    found = {name: value for stage in pipe.internals.chains[0].stages for name, value in stage.named_buffers()}
    plain = {
        name: value.to_dense() if value.is_sparse else value.clone()
        for name, value in found.items()
        if "jag" not in name
    }
    return plain, loss.calls.clone(), torch.rand(2), random.random(), np.random.rand()


def make():
    torch.manual_seed(0)
    x, target = data(8)
    loss = Counting()
    return (
        penstock.Pipeline([Odd(), nn.Tanh()], example=x, loss=loss, lanes=2, micro_batches=4, check=False),
        loss,
        x,
        target,
    )


def test_all_is_as_it_was():
    pipe, loss, x, target = make()
    with pipe:
        pipe.step(x, target)
        before = StateSnapshot(pipe)
        for _ in range(2):  # kept again, where memory is there already
            before.take()
            wanted = state(pipe, loss)
            pipe.step(x, target)
            before.restore()
            found = state(pipe, loss)
            assert found[0].keys() == wanted[0].keys()
            for name, value in wanted[0].items():
                assert torch.equal(found[0][name], value), name
            assert torch.equal(found[1], wanted[1])
            assert torch.equal(found[2], wanted[2])
            assert found[3:] == wanted[3:]
            pipe.step(x, target)


def test_a_buffer_is_the_same_object_afterwards():
    pipe, _, x, target = make()
    with pipe:
        held = pipe.internals.chains[0].stages[0].held
        own = {name: held.get(name) for name in held if "sparse" not in name and "jagged" not in name}
        before = StateSnapshot(pipe)
        before.take()
        pipe.step(x, target)
        before.restore()
        assert all(held.get(name) is tensor for name, tensor in own.items())


@pytest.mark.parametrize("lanes", [1, 2])
def test_locate_leaves_odd_buffers_alone(lanes):
    torch.manual_seed(0)
    x, target = data(8)
    x[5, 1] = float("nan")
    model = Odd()
    stages = [nn.Sequential(model, nn.Tanh())] if lanes == 1 else [model, nn.Tanh()]
    with penstock.Pipeline(stages, example=x, loss=nn.functional.mse_loss, lanes=lanes, micro_batches=4) as pipe:
        pipe.step(x, target)
        large = float(model.large.sum())
        place = locate(pipe, x, target)
        assert "the batch itself" in str(place)
        assert float(model.large.sum()) == large
