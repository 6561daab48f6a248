"""`pipe.step(..., scale=)`: the gradients of the scaled loss, and the loss itself."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.errors import UsageError
from pipelines import data, differences, expected, sequence
from runtime_everywhere import everywhere, pipeline

SCALE = 1 / 3


def scaled(model, batch, target, loss=F.mse_loss, scale=SCALE):
    """Return the plain loss, and the gradients of the scaled one."""
    _, gradients = expected(model, batch, target, lambda *given: loss(*given) * scale)
    return expected(model, batch, target, loss)[0], gradients


@everywhere
def test_a_scale_multiplies_the_gradients_and_not_the_loss():
    model = sequence(6)
    x, target = data(10)
    for schedule, keep in itertools.product(["1f1b", "zb_h1", "gpipe"], ["hold", "recompute"]):
        with pipeline(model, x, schedule=schedule, loss=F.mse_loss, keep=keep) as pipe:
            pipe.zero_grad()
            loss, _ = pipe.step(x, target, scale=SCALE, metrics=True)
            assert not list(differences(pipe, loss, scaled(model, x, target))), (schedule, keep)
            pipe.zero_grad()


@everywhere
def test_a_loss_over_the_batch_is_scaled_once():
    model = sequence(6)
    x, target = data(10)

    def root(output, target):
        return (output - target).square().mean().sqrt()

    with pipeline(model, x, schedule="zb_gpipe", loss=root, loss_over="batch") as pipe:
        loss = pipe.step(x, target, scale=SCALE)
        assert not list(differences(pipe, loss, scaled(model, x, target, root)))


@everywhere
def test_accumulation_equals_the_plain_loop():
    """Batches of different sizes: each counts one n-th, as in a plain loop."""
    model = sequence(6)
    plain = copy.deepcopy(model)
    batches = [data(size, seed=size) for size in (8, 10, 5)]
    for x, target in batches:
        (F.mse_loss(plain(x), target) / len(batches)).backward()
    with pipeline(model, batches[0][0], loss=F.mse_loss) as pipe:
        for x, target in batches:
            pipe.step(x, target, scale=1 / len(batches))
        wanted = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-12, atol=1e-14)


def test_a_gradient_scaler_and_a_scale_multiply():
    model = sequence(4)
    x, target = data(8)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pipeline(model, x, loss=F.mse_loss, scaler=scaler) as pipe:
        loss = pipe.step(x, target, scale=SCALE)
        assert not list(differences(pipe, loss, scaled(model, x, target, scale=1024.0 * SCALE)))


def test_updates_within_the_step_use_the_scale():
    """SGD with a scaled loss is SGD with a scaled learning rate."""
    weights = []
    x, target = data(8)
    for rate, scale in ((0.1, 0.5), (0.05, 1.0)):
        model = sequence(4)
        options = {"schedule": "pipedream", "optimizer": lambda params, rate=rate: torch.optim.SGD(params, lr=rate)}
        with pipeline(model, x, loss=F.mse_loss, **options) as pipe:
            for _ in range(2):
                pipe.step(x, target, scale=scale)
            weights.append(pipe.state_dict())
    assert all(torch.allclose(weights[0][name], weights[1][name], rtol=1e-12) for name in weights[0])
    assert any((weights[0][name] != tensor).any() for name, tensor in sequence(4).state_dict().items())


def test_a_scale_of_zero_gives_zero_gradients():
    model = sequence(4)
    x, target = data(8)
    with pipeline(model, x, loss=F.mse_loss) as pipe:
        loss = pipe.step(x, target, scale=0)
        torch.testing.assert_close(loss, F.mse_loss(model(x), target).detach())
        assert all(not p.grad.any() for p in pipe.parameters())


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, True, torch.ones(2)])
def test_a_scale_is_a_finite_number(scale):
    model = sequence(4)
    x, target = data(8)
    with penstock.Pipeline(model, example=x, loss=F.mse_loss, lanes=2, micro_batches=2) as pipe:
        with pytest.raises(UsageError, match="scale: give a finite number"):
            pipe.step(x, target, scale=scale)
        assert all(p.grad is None for p in pipe.parameters())
