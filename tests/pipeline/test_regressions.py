"""Bugs that were found and mended, each with its story."""

import time

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import LaneError
from pipelines import WIDTH, differences, expected


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.05)  # the lane behind goes on meanwhile
        return gradient


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return SlowBackward.apply(self.layer(x))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.float64))
        self.layer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x):
        return self.layer(x.view(x.shape[0], 5, 1, WIDTH).flatten(2) + self.positions.unsqueeze(0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_gradient_that_shares_its_memory_with_a_parameter_s(schedule):
    """What was sent was added to in place by the next micro-batch, before the slower lane had used it."""
    torch.manual_seed(0)
    stages = [First(), Positions()]
    x, target = torch.randn(2, 4, 5, WIDTH, dtype=torch.float64)
    with penstock.Pipeline(
        stages, example=x, loss=nn.functional.mse_loss, lanes=2, micro_batches=4, schedule=schedule
    ) as pipe:
        assert not list(differences(pipe, pipe.step(x, target), expected(nn.Sequential(*stages), x, target)))


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.double()
        self.filter.data = self.filter.data.to(torch.complex128)

    def forward(self, x):
        return self.b(torch.fft.ifft(torch.fft.fft(self.a(x)) * self.filter).real)


@pytest.mark.parametrize("keep", ["hold", "recompute", "except_last"])
def test_complex_values_between_stages_keep_their_gradient(keep):
    """A recomputed stage marked only real values as wanting one."""
    model = Spectral()
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    wanted = expected(model, x, target)
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, lanes=2, micro_batches=4, keep=keep, cuts=[2]
    ) as pipe:
        assert not list(differences(pipe, pipe.step(x, target), wanted))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.double()

    def forward(self, x):
        return self.b(nn.functional.dropout(self.a(x), 0.5, self.training))


def test_random_numbers_after_a_first_step_that_failed():
    """It counted as one that drew nothing, so the next forward and its recompute drew different masks."""
    model, x = Dropping(), torch.randn(8, WIDTH, dtype=torch.float64)
    with penstock.Pipeline(
        model, example=x, loss=torch.sum, weight="sum", lanes=2, micro_batches=4, keep="recompute",
        cuts=["b"], capture_path="export", analytic="h100",
    ) as pipe:  # fmt: skip
        weight, model.a.weight.data = model.a.weight.data, torch.randn(WIDTH, WIDTH + 1, dtype=torch.float64)
        with pytest.raises(LaneError):
            pipe.step(x)
        model.a.weight.data = weight
        pipe.zero_grad()
        loss = pipe.step(x)
        # the output is linear in the weight, so its gradient along itself is the loss: with the same masks only
        torch.testing.assert_close((model.a.weight * model.a.weight.grad).sum(), loss)


def test_an_overflow_where_gradients_do_not_lie_in_order():
    """Marking it needed a view that channels-last gradients do not have."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with penstock.Pipeline(
        model, example=x, loss=lambda o: (o * 1e6).sum(), lanes=2, micro_batches=2, cuts=[2], scaler=scaler
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
        before = [p.detach().clone() for p in pipe.parameters()]
        pipe.step(x)
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
        assert scaler.get_scale() < 2.0**126


def test_an_update_whose_micro_batches_count_nothing_changes_nothing():
    """Its mean over nothing made the whole step's loss not a number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))
    x, target = torch.randn(8, WIDTH), torch.randint(3, (8,))
    target[:2] = -100
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.cross_entropy, lanes=2, micro_batches=4, cuts=[1], schedule="pipedream",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), weight=lambda batch, target: (target != -100).sum(),
    ) as pipe:  # fmt: skip
        assert pipe.step(x, target).isfinite()
        assert all(p.isfinite().all() for p in model.parameters())
