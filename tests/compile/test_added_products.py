"""Products of a compiled backward that add to gradients themselves: loss and gradients are the plain model's."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.compile import added_products
from penstock.compile import passes as own_pass
from penstock.runtime.backward.gradient_accumulation import accumulated_together, reached_once

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own

WIDTH = 6


@pytest.fixture
def adds(monkeypatch):
    """Let it be so on a CPU too; return the shapes of gradients that a product added to."""
    found = []
    monkeypatch.setattr(own_pass, "OwnPass", partial(own_pass.OwnPass, devices=("cpu",)))
    real = torch.Tensor.addmm_

    def noted(total, *factors):
        found.append(total.shape)
        return real(total, *factors)

    monkeypatch.setattr(torch.Tensor, "addmm_", noted)
    return found


class Branches(nn.Module):
    """Two weights of one shape whose results are added, so that both get the same gradient; one that is used twice."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.twice, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        x = self.left(x.sin()) + self.right(x.cos())
        return self.frozen(self.twice(torch.tanh(self.twice(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def chain(num_layers=6):
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def faults(model, *, loss=nn.functional.mse_loss, steps=3, copied=lambda model: None, **options):
    """Return what differs from the plain model: gradients add up, are forgotten, and add up again."""
    model = model.double()
    plain = copy.deepcopy(model)
    copied(plain)
    wanted_loss = loss(plain) if isinstance(loss, type) else loss
    own_loss = loss(model) if isinstance(loss, type) else loss
    torch.manual_seed(1)
    found = []
    options = {"lanes": 2, "micro_batches": 2} | options
    example = torch.ones(4, WIDTH).double()
    with penstock.Pipeline(model, example=example, loss=own_loss, compile=True, **options) as pipe:
        for step in range(steps):
            x, y = torch.randn(4, WIDTH).double(), torch.randn(4, WIDTH).double()
            made = pipe.step(x, y)
            right = wanted_loss(plain(x), y)
            right.backward()
            if not torch.allclose(made, right, rtol=1e-12):
                found.append(f"step {step}: loss")
            for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if (p.grad is None) != (other.grad is None):
                    found.append(f"step {step}: {name} has a gradient, or has none")
                elif p.grad is not None and not torch.allclose(p.grad, other.grad, rtol=1e-10, atol=1e-13):
                    found.append(f"step {step}: {name}")
            if step == 1:
                pipe.zero_grad()
                plain.zero_grad()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
def test_schedules(adds, schedule):
    torch.manual_seed(0)
    assert not faults(chain(), schedule=schedule, steps=4, capture_path="direct")
    assert bool(adds) == (schedule != "zb_h1")  # whose weight gradients are put off


@pytest.mark.sample(4)
@pytest.mark.parametrize("path", ["direct", "export"])
@pytest.mark.parametrize("model", [Branches, Tied])
@pytest.mark.parametrize("lanes", [1, 2])
def test_weights_that_get_more_than_one_gradient(adds, model, path, lanes):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), model(), nn.Linear(WIDTH, WIDTH))
    assert not faults(whole, lanes=lanes, cuts=[2][: lanes - 1], capture_path=path)
    assert bool(adds) != (lanes == 2 and path == "export" and model is Tied)  # there, two lanes have the same weight


class Penalty:
    """A loss that reaches a weight by itself too."""

    def __init__(self, model):
        self.weight = model[-2].weight

    def __call__(self, output, target):
        return nn.functional.mse_loss(output, target) + 0.1 * self.weight.square().sum()


def test_a_loss_that_reaches_a_weight(adds):
    torch.manual_seed(0)
    assert not faults(chain(4), loss=Penalty)
    assert adds


@pytest.mark.parametrize("lanes", [1, 2])
def test_weights_that_share_memory_but_not_gradients(adds, lanes):
    torch.manual_seed(0)
    model = chain(6).double()
    model[8].weight.data = model[2].weight.data
    assert not faults(
        model, lanes=lanes, cuts=[6][: lanes - 1], copied=lambda m: m[8].weight.data.set_(m[2].weight.data)
    )
    assert adds


def test_a_hook_sees_the_gradient(adds):
    torch.manual_seed(0)
    model = chain(4)
    plain = copy.deepcopy(model)
    seen = []
    model[4].weight.register_hook(lambda gradient: (seen.append(gradient.clone()), 2 * gradient)[1])
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    options = {"lanes": 2, "micro_batches": 2, "compile": True}
    with penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, **options) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(x, y)
    nn.functional.mse_loss(plain(x), y).backward()
    torch.testing.assert_close(sum(seen[-2:]), plain[4].weight.grad)
    torch.testing.assert_close(model[4].weight.grad, 2 * plain[4].weight.grad)
    torch.testing.assert_close(model[2].weight.grad, plain[2].weight.grad)
    assert adds


def test_what_is_reached_once():
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    twice = a * b
    assert reached_once([(twice + b).sum()]) == {id(a)}
    assert reached_once([twice.sum(), (c * 2).sum()]) == {id(a), id(b), id(c)}
    assert reached_once([(a * a).sum(), torch.ones(1)]) == set()
    assert reached_once([c]) == set()  # itself


def test_sums_are_forgotten(adds):
    torch.manual_seed(0)
    assert not faults(chain(2), lanes=1)
    assert adds
    assert not added_products._sums
    weight, given, rows = nn.Parameter(torch.ones(2, 3)), torch.randn(4, 2), torch.randn(4, 3)
    torch.testing.assert_close(torch.ops.penstock.add_product(given, rows, weight), given.T @ rows)
    assert len(adds) == len([shape for shape in adds if shape == (WIDTH, WIDTH)])


class CompiledFunction(torch.autograd.Function):
    """A linear layer as the compiler's, by name."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows @ weight.T

    @staticmethod
    def backward(ctx, given):
        rows, weight = ctx.saved_tensors
        return given @ weight, torch.ops.penstock.add_product(given, rows, weight)


@pytest.mark.parametrize("is_changed", [False, True])
def test_a_gradient_that_comes_unseen_is_not_lost_without_a_word(is_changed):
    weight = nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones(2, 3)
    rows, given = torch.randn(4, 3), torch.randn(4, 2)

    def step():
        output = CompiledFunction.apply(rows, weight)
        with accumulated_together([weight], [output]):
            output.backward(given)
            if is_changed:  # as by a backward within a hook
                weight.grad.add_(1)

    if is_changed:
        with pytest.raises(RuntimeError, match="in a way that autograd's graph does not show"):
            step()
    else:
        step()
    torch.testing.assert_close(weight.grad, 1 + given.T @ rows)
    assert not added_products._sums


# ---- what a model may do besides


def used(x, weight):
    rows = torch.sin(x)  # the compiler saves the weight as it is if it is read in other ways too
    return torch.tanh(nn.functional.linear(rows, weight) + (rows[:, None, :] * weight.detach()).sum(-1))


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


class OtherView(nn.Module):
    """A weight that is a view of a parameter, made where the compiler does not look."""

    def __init__(self, kind):
        super().__init__()
        shape = (WIDTH * WIDTH,) if kind == "flat" else (WIDTH, WIDTH)
        self.kind, self.weight, self.last = kind, nn.Parameter(torch.randn(shape) / 3), nn.Linear(WIDTH, WIDTH)
        if kind == "turned":
            self.weight = nn.Parameter(self.weight.data.t())

    @torch._dynamo.disable
    def view(self):
        kinds = {"half": Half.apply, "turned": torch.t, "flat": lambda weight: weight.view(WIDTH, WIDTH)}
        return kinds[self.kind](self.weight)

    def forward(self, x):
        return self.last(used(x, self.view()))


class Equilibrium(nn.Module):
    """A fixed point, whose backward is found by backwards within a hook."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def cell(self, z, x):
        return 0.3 * torch.tanh(self.inner(z)) + x

    @torch._dynamo.disable(recursive=False)
    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if z.requires_grad:
            start = z.detach().requires_grad_()
            found = self.cell(start, x.detach())

            def solve(gradient):
                y = gradient
                for _ in range(20):
                    y = torch.autograd.grad(found, start, y, retain_graph=True)[0] + gradient
                return y

            z.register_hook(solve)
        return z


class Checkpointed(nn.Module):
    """A weight that a checkpoint uses too, which runs a backward of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        torch._dynamo.graph_break()
        return torch.tanh(self.layer(x))

    def forward(self, x):
        return self.layer(torch.sin(checkpoint(self.body, x, use_reentrant=True)))


class Ordered(nn.Module):
    """An operation whose order counts: the compiler hands a token through, and neighbours among weights move up."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(4))

    def forward(self, x):
        torch.ops.aten._print("")
        a, b, c, d = self.weights
        linear = nn.functional.linear
        return linear(x.sin(), a) + linear(x.cos(), b) + linear(x.tanh(), c) + linear(x, d)


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.variable = x.detach()  # as the nodes of autograd that end in a parameter have it
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Misleading(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    @torch._dynamo.disable
    def other(self):
        return Named.apply(self.layer.weight * 1.0)

    def forward(self, x):
        return self.layer(torch.sin(x)) + self.other().sum() / 10


ODD = [
    *(partial(OtherView, kind) for kind in ("half", "turned", "flat")),
    Equilibrium,
    Checkpointed,
    Ordered,
    Misleading,
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("odd", ODD, ids=["half", "turned", "flat", "equilibrium", "checkpoint", "ordered", "named"])
def test_models_that_do_more(adds, odd):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), odd(), nn.Linear(WIDTH, WIDTH))
    assert not faults(whole, lanes=1, capture_path="direct")


def test_while_anomalies_are_looked_for(adds):
    """That looks at what nobody else reads, and memory may hold anything."""
    torch.manual_seed(0)
    with torch.autograd.set_detect_anomaly(True):
        assert not faults(chain(3), lanes=1)
    assert not adds
