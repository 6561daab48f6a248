"""Gradients that are added all at once are those that autograd adds one by one, bit for bit."""

import copy
import weakref

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.backward.gradient_accumulation import GradientAccumulation, accumulated_together


class Towers(nn.Module):
    """A parameter that is used twice, one that is not used, one that is frozen, one whose gradient is sparse."""

    def __init__(self, sparse=True):
        super().__init__()
        self.words = nn.Embedding(7, 4, sparse=sparse)
        self.twice = nn.Linear(4, 4)
        self.never = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, ids):
        return self.frozen(self.twice(torch.tanh(self.twice(self.words(ids))))).square().sum()


def gradients(model):
    return {name: None if p.grad is None else p.grad.to_dense() for name, p in model.named_parameters()}


def assert_same(model, plain):
    found, wanted = gradients(model), gradients(plain)
    for name, gradient in wanted.items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name


@pytest.mark.parametrize("sparse", [True, False])
def test_added_together(sparse):
    torch.manual_seed(0)
    model = Towers(sparse)
    plain = copy.deepcopy(model)
    for step in range(4):
        ids = torch.randint(0, 7, (3, 2))
        where = {name: p.grad for name, p in model.named_parameters()}
        with accumulated_together(model.parameters()):
            model(ids).backward()
        plain(ids).backward()
        assert_same(model, plain)
        if step:  # in the memory that was there, as a captured graph needs it
            assert model.twice.weight.grad is where["twice.weight"]
        if step == 2:  # a dense one under a sparse one
            for one in (model, plain):
                one.words.weight.grad = one.words.weight.grad.to_dense()


def test_one_that_is_sparse_below_a_dense_one():
    one = nn.Parameter(torch.ones(3))
    one.grad = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    with accumulated_together([one]):
        (one * 2).sum().backward()
    assert torch.equal(one.grad, torch.tensor([2.0, 3.0, 2.0]))


def test_a_backward_that_fails_leaves_gradients_as_they_were():
    torch.manual_seed(0)
    model = Towers()
    ids = torch.randint(0, 7, (3, 2))
    model(ids).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = gradients(model)

    def fail(gradient):
        raise RuntimeError("no")

    loss = model(ids)
    model.twice.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"), accumulated_together(model.parameters()):
        loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name]
        assert values[name] is None or torch.equal(parameter.grad.to_dense(), values[name])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


def layers():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


# of the compiler's own
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


@quiet
@pytest.mark.parametrize(
    ("model", "options", "wanted"),
    [
        (layers, {"compile": True}, [True, True]),
        (layers, {}, [False, False]),
        (layers, {"compile": True, "schedule": "chimera"}, [False] * 4),
        (Tied, {"compile": True}, [False, False]),
    ],
)
def test_who_adds_together(model, options, wanted):
    """Who compiles, but not where two lanes give gradients to the same parameters at a time."""
    with penstock.Pipeline(
        model(), example=torch.ones(4, 4), loss=nn.functional.mse_loss, lanes=2, micro_batches=2, **options
    ) as pipe:
        executors = pipe.internals.executors()
        runs = [run for executor in executors for run in executor.stages.values()]
        assert [run._accumulation is not None and run._is_alone for run in runs] == wanted


needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_steps_whose_gradients_are_not_cleared(device):
    """On a GPU inside graphs from the second step on."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers).double().to(device)
    plain = copy.deepcopy(model)
    with penstock.Pipeline(
        model, example=torch.ones(4, 4).double().to(device), loss=nn.functional.mse_loss, devices=[device] * 2,
        micro_batches=4, compile=True,
    ) as pipe:  # fmt: skip
        for _ in range(4):
            x, y = (torch.randn(8, 4).double().to(device) for _ in range(2))
            pipe.step(x, y)
            nn.functional.mse_loss(plain(x), y).backward()
            for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=1e-10), name


def test_one_gradient_for_two_parameters():
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    one.grad = other.grad = torch.zeros(3)
    with accumulated_together([one, other]):
        (one * 2 + other * 3).sum().backward()
    assert one.grad is other.grad
    assert one.grad.tolist() == [5.0] * 3


def test_what_is_not_added_together():
    """What the loss of another lane reaches, and what has a hook that sees the sum."""
    first, second, third = (nn.Parameter(torch.ones(3)) for _ in range(3))
    accumulation = GradientAccumulation()
    assert accumulation.eligible([first, second, third]) == [first, second, third]
    third.register_post_accumulate_grad_hook(lambda parameter: None)
    made = (second * torch.ones(3, requires_grad=True)).sum() + first.square().mean()
    accumulation.observe(made, own=[second])
    assert [p is second for p in accumulation.eligible([first, second, third])] == [True]
    accumulation.observe(torch.ones(()), own=[])
    given = torch.ones(3, requires_grad=True)  # what came from the stage before
    accumulation.observe((second * given).sum(), own=[second])
    held = weakref.ref(given)
    del given, made
    assert held() is None


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("reached", ["closure", "module"])
def test_a_loss_that_reaches_another_lane_s_parameters(reached):
    """Its gradient is added by the last lane while the first runs backwards of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).double()
    plain = copy.deepcopy(model)

    class Penalty(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, found, wanted):
            return nn.functional.mse_loss(found, wanted) + self.weight.square().mean()

    def loss_for(weight):
        return Penalty(weight) if reached == "module" else Penalty(weight).forward

    with penstock.Pipeline(
        model, example=torch.ones(16, 16).double(), loss=loss_for(model[0].weight), lanes=2, micro_batches=16,
        compile=True,
    ) as pipe:  # fmt: skip
        for _ in range(20):
            pipe.zero_grad()
            plain.zero_grad()
            x, y = torch.randn(16, 16).double(), torch.randn(16, 16).double()
            pipe.step(x, y)
            # now and then a race would show in the gradients, so it is also looked at who adds
            runs = [run for e in pipe.internals.executors() for run in e.stages.values()]
            alone = [p for run in runs for p in run._accumulation.eligible(run.stage.parameters())]
            assert len(alone) == 7
            assert all(p is not model[0].weight for p in alone)
            loss_for(plain[0].weight)(plain(x), y).backward()
            for (name, p), q in zip(pipe.named_parameters(), plain.parameters(), strict=True):
                assert torch.allclose(p.grad, q.grad, rtol=1e-10), name


@pytest.mark.slow
@quiet
def test_a_hook_sees_the_sum():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    found = {}
    for is_compiled in (True, False):
        own = copy.deepcopy(model)
        seen = found.setdefault(is_compiled, [])
        with penstock.Pipeline(
            own, example=torch.ones(4, 4).double(), loss=nn.functional.mse_loss, lanes=2, micro_batches=4, cuts=[2],
            compile=is_compiled,
        ) as pipe:  # fmt: skip
            hooked = dict(pipe.named_parameters())["0.weight"]
            hooked.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
            for seed in range(2):
                torch.manual_seed(seed)
                pipe.step(torch.randn(8, 4).double(), torch.randn(8, 4).double())
    assert len(found[True]) == len(found[False]) == 8
    assert all(torch.allclose(a, b) for a, b in zip(found[True], found[False], strict=True))
