"""Training through a pipeline as training without: precision, gradients, state, random numbers, updates within."""

import copy
import functools
import tempfile
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.errors import UsageError
from penstock.schedule.schedule import Schedule
from pipelines import Knotty, data, differences, expected, sequence
from runtime_everywhere import everyone, everywhere, pipeline

WIDTH = 6
SCALE = torch.tensor(0.9, dtype=torch.float64)  # what Knotty takes beside its batch


def knotty_data(size=8, seed=1):
    x, target = data(size, seed)
    return (x, SCALE), target


def in_pieces(model, x, target, *, sizes, cast=None, loss=F.mse_loss, scale=1.0):
    """Train the plain model micro-batch by micro-batch; return its loss and gradients."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    total = 0
    for piece, aim in zip(x.split(sizes), target.split(sizes), strict=True):
        with torch.autocast("cpu", dtype=cast, enabled=cast is not None, cache_enabled=False):
            value = loss(plain(piece), aim)
        (value * (len(piece) / len(x) * scale)).backward()
        total = total + value.detach() * (len(piece) / len(x))
    return total, {name: p.grad for name, p in plain.named_parameters()}


def single(count=3):
    """Return a model of 32 bits, with blocks that autocast lowers and a norm that it does not."""
    torch.manual_seed(0)
    blocks = [m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def single_data(size=8, seed=1):
    return [tensor.float() for tensor in data(size, seed)]


# ---- precision


def with_one_thread(body):
    """Run a body with one thread of torch, as lanes do: how sums of 16 bits are rounded depends on it."""

    @functools.wraps(body)
    def run():
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            body()
        finally:
            torch.set_num_threads(before)

    return run


@everywhere
@with_one_thread
def test_autocast():
    """Its own option and an autocast around the call do as autocast does to the plain model."""
    model = single()
    x, target = single_data(10)
    wanted = in_pieces(model, x, target, sizes=[3, 3, 2, 2], cast=torch.bfloat16)
    assert wanted[0] != in_pieces(model, x, target, sizes=[3, 3, 2, 2])[0]
    for schedule, keep in [("1f1b", "hold"), ("zb_h1", "hold"), ("1f1b", "recompute")]:
        with pipeline(model, x, schedule=schedule, keep=keep, loss=F.mse_loss, autocast=torch.bfloat16) as pipe:
            assert not list(differences(pipe, pipe.step(x, target), wanted, 1e-6))
            assert pipe.forward(x).dtype is torch.bfloat16
        model.zero_grad()
        with pipeline(model, x, schedule=schedule, keep=keep, loss=F.mse_loss) as pipe:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert not list(differences(pipe, pipe.step(x, target), wanted, 1e-6))
                torch.testing.assert_close(pipe.evaluate(x, target), wanted[0])
            pipe.zero_grad()
            plain = in_pieces(model, x, target, sizes=[3, 3, 2, 2])
            assert not list(differences(pipe, pipe.step(x, target), plain, 1e-6))
            pipe.zero_grad()


def scaled(init_scale):
    """Return a scaler that grows soon."""
    return torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)


def train_scaled(model, batches, *, init_scale):
    """Train the plain model with 16 bits and a scaler; return it and the scaler's course."""
    scaler, scales = scaled(init_scale), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, target in batches:
        optimizer.zero_grad()
        for piece, aim in zip(x.split(2), target.split(2), strict=True):
            with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
                value = F.mse_loss(model(piece), aim) * (len(piece) / len(x))
            scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def overflowing():
    """Return batches of which the third makes gradients that 16 bits do not hold."""
    batches = [single_data(8, seed=seed) for seed in range(5)]
    batches[2][1][0] = 1e6
    return batches


@everywhere
@with_one_thread
def test_scaler():
    """All lanes see the overflow of one: they skip the same update, and go on with the same scale."""
    torch.manual_seed(0)
    model = single()
    plain = copy.deepcopy(model)
    wanted = train_scaled(plain, overflowing(), init_scale=2.0**12)
    assert wanted[2] < wanted[1]
    scaler, scales = scaled(2.0**12), []
    with pipeline(model, single_data()[0], loss=F.mse_loss, autocast=torch.float16, scaler=scaler) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        for x, target in overflowing():
            optimizer.zero_grad()
            pipe.step(x, target)
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == wanted
        assert_weights(pipe, plain, 1e-5)


def assert_weights(pipe, plain, tolerance=1e-9):
    wanted = plain.state_dict()
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(
            tensor, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


class Overflow(torch.autograd.Function):
    """Its gradient is infinite where it is told to be; forward it does nothing."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x + 0 * weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        is_bad = bool((x[:, 0] > 1e4).any())
        return gradient, torch.full((WIDTH,), float("inf") if is_bad else 0.0)


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return Overflow.apply(x, self.weight).clamp(-3, 3)


def test_a_new_scaler():
    """The pipeline is the one who scales: the user calls no scale()."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, target = single_data()
    with pipeline(single(), x, loss=F.mse_loss, scaler=scaler) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(x, target)
        scaler.step(optimizer)
        scaler.update()


@everywhere
def test_an_overflow_on_one_lane():
    """Only one parameter of the first lane overflows, once: no lane updates its weights in that step."""
    torch.manual_seed(0)
    modules = [Fragile(), nn.Linear(WIDTH, WIDTH)]
    scaler = scaled(4.0)
    x, target = single_data()
    with penstock.Pipeline(modules, example=x, loss=F.mse_loss, lanes=2, scaler=scaler, micro_batches=4) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for is_bad in (False, True, False):
            before = [p.detach().clone() for p in pipe.parameters()]
            given = x.clone()
            given[3, 0] = 1e5 if is_bad else 0
            scale = scaler.get_scale()
            pipe.step(given, target)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed = [not torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True)]
            assert any(everyone(any(changed))) != is_bad
            assert (scaler.get_scale() < scale) == is_bad


# ---- gradients


@everywhere
def test_clip_grad_norm():
    """The norm is that of the whole model, a tied weight counted once; gradients are scaled as torch would."""
    model = Knotty()
    batch, target = knotty_data()
    for schedule in ("1f1b", "dualpipe"):
        with pipeline(model, batch, schedule=schedule, loss=F.mse_loss, path="replay") as pipe:
            for norm_type, max_norm in [(2.0, 0.01), (2.0, 1e6), (1.0, 0.5), (3.0, 0.01), (float("inf"), 0.01)]:
                plain = copy.deepcopy(model)
                plain.zero_grad()
                F.mse_loss(plain(*batch), target).backward()
                norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
                pipe.zero_grad()
                loss = pipe.step(batch, target)
                torch.testing.assert_close(pipe.clip_grad_norm_(max_norm, norm_type), norm, rtol=1e-10, atol=0)
                wanted = loss, {name: p.grad for name, p in plain.named_parameters()}
                assert not list(differences(pipe, loss, wanted))


@everywhere
def test_accumulation():
    """Three batches of different sizes add up as three backwards do."""
    model = Knotty()
    sums = {}
    for size in (8, 3, 10):
        loss, gradients = expected(model, *knotty_data(size, seed=size))
        for name, gradient in gradients.items():
            if gradient is not None:
                sums[name] = sums.get(name, 0) + gradient
    for schedule, keep in [("1f1b", "hold"), ("zb_h1", "recompute")]:
        with pipeline(model, knotty_data()[0], schedule=schedule, keep=keep, loss=F.mse_loss) as pipe:
            for size in (8, 3, 10):
                got = pipe.step(*knotty_data(size, seed=size))
            assert not list(differences(pipe, got, (loss, dict.fromkeys(dict(model.named_parameters())) | sums)))
            pipe.zero_grad(set_to_none=False)
            assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())
            got = pipe.step(*knotty_data(10, seed=10))
            assert not list(differences(pipe, got, (loss, gradients)))
            pipe.zero_grad()
            assert all(p.grad is None for p in pipe.parameters())


@everywhere
def test_no_sync():
    """Gradients of a tied weight are added up over lanes once, at the first step outside."""
    model = Knotty()
    sums = {}
    for seed in range(3):
        loss, gradients = expected(model, *knotty_data(seed=seed))
        for name, gradient in gradients.items():
            if gradient is not None:
                sums[name] = sums.get(name, 0) + gradient
    wanted = loss, dict.fromkeys(dict(model.named_parameters())) | sums
    with pipeline(model, knotty_data()[0], loss=F.mse_loss) as pipe:
        for _ in range(2):
            with pipe.no_sync():
                pipe.step(*knotty_data(seed=0))
                pipe.step(*knotty_data(seed=1))
            assert not list(differences(pipe, pipe.step(*knotty_data(seed=2)), wanted))
            pipe.zero_grad()
        with pipe.no_sync():
            pipe.step(*knotty_data(seed=0))
        pipe.zero_grad()  # what waits is forgotten with the rest
        loss, gradients = expected(model, *knotty_data(seed=2))
        assert not list(differences(pipe, pipe.step(*knotty_data(seed=2)), (loss, gradients)))


@everywhere
def test_frozen_parameters():
    """A frozen stage, a frozen first layer; nothing is made for what wants no gradient."""
    x, target = data(8)
    for frozen in ([0, 2], [4, 6], [0, 2, 4], range(0, 8, 2)):
        for schedule, keep in [("1f1b", "hold"), ("zb_h1", "hold"), ("1f1b", "recompute")]:
            model = sequence(4)
            for place in frozen:
                model[place].requires_grad_(False)
            if frozen == range(0, 8, 2):
                model[0].bias.requires_grad_(True)
            wanted = expected(model, x, target)
            with pipeline(model, x, schedule=schedule, keep=keep, loss=F.mse_loss) as pipe:
                assert not list(differences(pipe, pipe.step(x, target), wanted))
                assert all((p.grad is not None) == p.requires_grad for _, p in pipe.named_parameters())


def check_unfreezing(keep):
    """Train parameters later that are frozen at first, as in fine-tuning, and the other way round."""
    model = sequence(4)
    x, target = data(8)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    with pipeline(model, x, loss=F.mse_loss, keep=keep) as pipe:
        for frozen in ([0, 2], [], [4], [0, 4]):
            for place in range(0, 8, 2):
                model[place].requires_grad_(place not in frozen)
            pipe.zero_grad()
            wanted = expected(model, x, target)
            assert not list(differences(pipe, pipe.step(x, target), wanted))


@everywhere
def test_unfreezing():
    for keep in ("hold", "offload"):
        check_unfreezing(keep)


@everywhere
def test_unfreezing_what_is_recomputed():
    check_unfreezing("recompute")


@everywhere
def test_unfreezing_a_tied_weight():
    model = Knotty()
    model.first.requires_grad_(False)
    batch, target = knotty_data()
    with pipeline(model, batch, loss=F.mse_loss) as pipe:
        pipe.step(batch, target)
        for p in (model.first.weight, model.first.bias):
            p.requires_grad_(True)
        pipe.zero_grad()
        assert not list(differences(pipe, pipe.step(batch, target), expected(model, batch, target)))


@everywhere
def test_parameters_without_gradient():
    """What the loss does not depend on has none, as in the plain model, and an optimizer passes it over."""
    model = Knotty()
    batch, target = knotty_data()
    with pipeline(model, batch, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.5)
        pipe.step(batch, target)
        named = dict(pipe.named_parameters())
        if "unused" in named:
            assert named["unused"].grad is None
        optimizer.step()
        assert torch.equal(named.get("unused", torch.ones(3)), torch.ones(3))
        assert all("frozen" not in name or not p.requires_grad for name, p in named.items())
    assert any("unused" in names for names in everyone(list(named)))


# ---- the whole loop


def optimizers(named):
    """Return an optimizer with two groups of parameters, and its learning rate's schedule."""
    named = dict(named)
    groups = [
        {"params": [p for name, p in named.items() if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "bias" in name], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.05)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)


@everywhere
def test_training():
    """Five steps with clipping, groups of parameters and a learning rate that changes."""
    plain = Knotty()
    optimizer, rates = optimizers(plain.named_parameters())
    losses = []
    for seed in range(5):
        batch, target = knotty_data(10, seed=seed)
        optimizer.zero_grad()
        loss = F.mse_loss(plain(*batch), target)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        rates.step()
        losses.append(loss.detach())
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_v", "dualpipe"):
        model = Knotty()
        got = []
        with pipeline(model, knotty_data()[0], schedule=schedule, path="replay", loss=F.mse_loss) as pipe:
            optimizer, rates = optimizers(pipe.named_parameters())
            for seed in range(5):
                optimizer.zero_grad()
                got.append(pipe.step(*knotty_data(10, seed=seed)))
                pipe.clip_grad_norm_(0.1)
                optimizer.step()
                rates.step()
            torch.testing.assert_close(got, losses, rtol=1e-9, atol=1e-9)
            wanted = dict(plain.named_parameters())
            for name, p in pipe.named_parameters():
                torch.testing.assert_close(p, wanted[name], rtol=1e-9, atol=1e-9)


# ---- batch norm


def norms():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH)).double()


@everywhere
def test_deferred_batch_norm():
    """Running statistics are those of whole batches, and a step counts as one."""
    plain = norms()
    for seed in range(2):
        plain(data(10, seed=seed)[0])
    for schedule, keep in [("1f1b", "hold"), ("gpipe", "recompute"), ("zb_h1", "offload")]:
        model = norms()
        with pipeline(
            model, data(10)[0], schedule=schedule, keep=keep, cuts=[2], loss=F.mse_loss, deferred_batch_norm=True
        ) as pipe:
            for seed in range(2):
                pipe.step(*data(10, seed=seed))
            state = pipe.state_dict()
            for name, tensor in plain.named_buffers():
                if name in state and (name.startswith("0.") or "tracked" in name):
                    torch.testing.assert_close(state[name], tensor, rtol=1e-10, atol=1e-10)


def two_way_norms(*, is_deferred):
    """Train a step on two ways; return the statistics of the first norm and those of the plain model."""
    model, plain = norms(), norms()
    plain(data(8)[0])
    with pipeline(
        model, data(8)[0], schedule="chimera", cuts=[2], loss=F.mse_loss, deferred_batch_norm=is_deferred
    ) as pipe:
        pipe.step(*data(8))
        state = pipe.state_dict()
    return {name: tensor for name, tensor in state.items() if name.startswith("0.running")}, plain.state_dict()


@everywhere
def test_deferred_batch_norm_on_two_ways():
    """A stage that lives on two lanes sees half of the micro-batches on each; its statistics are of all."""
    state, wanted = two_way_norms(is_deferred=True)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-10, atol=1e-10)


@everywhere
def test_batch_norm_on_two_ways():
    """Whatever the order of the micro-batches, both lanes have the same statistics after a step."""
    found = everyone(two_way_norms(is_deferred=False)[0])
    for state in found:
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, found[0][name], rtol=1e-10, atol=1e-10)


# ---- modes and outputs


@dataclass
class Made:
    """What a model returns."""

    logits: torch.Tensor
    hidden: list
    name: str = "made"


Pair = namedtuple("Pair", ["x", "mean"])


class Returning(nn.Module):
    """Returns values of several stages in containers of all kinds, one of them twice, and what it was given."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.double()

    def forward(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(torch.tanh(layer(hidden[-1])))
        last = hidden[-1]
        match self.kind:
            case "dict":
                return {"logits": last, "early": hidden[1], "again": last, "mean": last.mean()}
            case "dataclass":
                return Made(last, hidden[1:3])
            case "tuple":
                return last, None, Pair(hidden[2], last.mean()), 3
            case _:
                return {"logits": last, "given": x}


KINDS = ["dict", "dataclass", "tuple"]


def as_parts(made):
    if isinstance(made, Made):
        return [made.logits, *made.hidden, made.name]
    return list(made.values()) if isinstance(made, dict) else [made[0], made[1], *made[2], made[3]]


def check_outputs(kind, path, schedule="1f1b"):
    model = Returning(kind)
    with pipeline(model, data(8)[0], path=path, schedule=schedule) as pipe:
        for size in (8, 10, 3):
            x, _ = data(size)
            made, wanted = pipe.forward(x), model(x)
            assert type(made) is type(wanted)
            for got, want in zip(as_parts(made), as_parts(wanted), strict=True):
                if torch.is_tensor(want):
                    torch.testing.assert_close(got, want)
                else:
                    assert got == want


@pytest.mark.parametrize("path", ["export", "replay"])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind, path):
    check_outputs(kind, path)


@pytest.mark.parametrize(
    "path",
    [
        "export",
        "replay",
    ],
)
def test_an_output_that_is_an_input(path):
    """The last stage need not take what the model hands back as it came."""
    model = Returning("given")
    x, _ = data(8)
    with pipeline(model, x, path=path) as pipe:
        made = pipe.forward(x)
        torch.testing.assert_close(made, model(x))


@everywhere
def test_outputs_over_lanes():
    """All lanes get all outputs, or only those that end the model do."""
    for kind in KINDS:
        check_outputs(kind, "replay")
    check_outputs("dict", "replay", "chimera")
    model = sequence(4)
    x, _ = data(8)
    with pipeline(model, x) as pipe:
        made = everyone(pipe.forward(x, gather="last"))
        torch.testing.assert_close(made[-1], model(x))
        assert made[:-1] == [None] * (len(made) - 1)
        with pytest.raises(UsageError, match="gather"):
            pipe.forward(x, gather="first")


@everywhere
def test_modes():
    """The pipeline starts in the model's mode; evaluate leaves the mode, and the gradients, as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)).double()
    model.eval()
    x, _ = data(8)
    target = torch.zeros(8, 1, dtype=torch.float64)
    with pipeline(model, x, loss=F.mse_loss) as pipe:
        assert not pipe.training
        torch.testing.assert_close(pipe.forward(x), model(x))
        with pytest.raises(UsageError, match="train"):
            pipe.step(x, target)
        assert pipe.train() is pipe
        assert pipe.training
        pipe.step(x, target)
        state = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        first = pipe.evaluate(x, target)
        assert pipe.training
        torch.testing.assert_close(first, pipe.evaluate(x, target))
        assert first.grad_fn is None
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, state[name])
        assert not pipe.eval().training
        torch.testing.assert_close(F.mse_loss(pipe.forward(x), target), first)


# ---- state


@everywhere
def test_names_of_the_state():
    """All lanes together have the model's own names and values: tied, frozen, unused and buffers; each only its own."""
    for path in ("export", "replay"):
        model = Knotty()
        model.alias = model.first  # a module under two names
        model.register_buffer("hidden", torch.ones(2), persistent=False)
        wanted = model.state_dict()
        with pipeline(model, knotty_data()[0], path=path, loss=F.mse_loss) as pipe:
            states = everyone({name: tensor.detach() for name, tensor in pipe.state_dict().items()})
        assert set().union(*states) == set(wanted)
        for state in states:
            assert len(state) < len(wanted) or len(states) == 1
            for name, tensor in state.items():
                assert torch.equal(tensor, wanted[name])
    with pipeline(sequence(4), data(8)[0]) as pipe:
        assert set().union(*everyone(list(pipe.state_dict()))) == set(sequence(4).state_dict())
        assert set().union(*everyone([n for n, _ in pipe.named_parameters()])) == set(sequence(4).state_dict())


def other_sequence():
    model = sequence(4)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return model


@everywhere
def test_load_state_dict():
    other = other_sequence()
    x, target = data(8)
    with pipeline(sequence(4), x, loss=F.mse_loss) as pipe:
        pipe.load_state_dict(other.state_dict())
        assert not list(differences(pipe, pipe.step(x, target), expected(other, x, target)))
        assert_weights(pipe, other)
        own = {name: tensor + 1 for name, tensor in pipe.state_dict().items()}
        pipe.load_state_dict(own)  # a lane's own part is enough
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, own[name])


@everywhere
def test_a_tied_weight_is_loaded_at_both_ends():
    model, other = Knotty(), Knotty()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    batch, target = knotty_data()
    with pipeline(model, batch, loss=F.mse_loss) as pipe:
        pipe.load_state_dict(other.state_dict())
        assert not list(differences(pipe, pipe.step(batch, target), expected(other, batch, target)))


def wrong_states():
    """Return states with a fault each, and what the error says of it."""
    good = other_sequence().state_dict()
    first, last = "0.weight", "6.bias"
    return [
        ({name: t for name, t in good.items() if name not in (first, last)}, rf"missing:.*{first}.*{last}"),
        (good | {first: torch.zeros(3, 2), last: torch.zeros(1)}, rf"{first}: \(3, 2\).*{last}: \(1,\)"),
        (good | {"nobody.weight": torch.zeros(1)}, "not in the model: nobody.weight"),
    ]


def test_a_state_that_does_not_fit():
    """One error lists all faults, and nothing has changed."""
    with pipeline(sequence(4), data(8)[0], loss=F.mse_loss) as pipe:
        for state, message in wrong_states():
            with pytest.raises(UsageError, match=message):
                pipe.load_state_dict(state)
            assert_weights(pipe, sequence(4), 0)
        partial, _ = wrong_states()[0]
        pipe.load_state_dict(partial, strict=False)
        assert torch.equal(pipe.state_dict()["2.weight"], partial["2.weight"])
        assert torch.equal(pipe.state_dict()["0.weight"], sequence(4).state_dict()["0.weight"])


def all_refuse(name, tensor):
    """Does every process refuse a whole state in which one tensor is wrong, and is as it was?"""
    state = {n: t for n, t in other_sequence().state_dict().items() if n != name}
    if tensor is not None:
        state[name] = tensor
    with pipeline(sequence(4), data(8)[0], loss=F.mse_loss) as pipe:
        try:
            pipe.load_state_dict(state)
            is_refused = False
        except UsageError:
            is_refused = True
        wanted = sequence(4).state_dict()
        is_same = all(torch.equal(t, wanted[n]) for n, t in pipe.state_dict().items())
        return everyone((is_refused, is_same))


@everywhere
def test_an_unknown_name_is_refused_by_all():
    assert set(all_refuse("nobody", torch.zeros(1))) == {(True, True)}


@everywhere
def test_a_fault_on_another_lane_is_refused_by_all():
    """Else lanes go on with weights of different states."""
    assert set(all_refuse("6.bias", torch.zeros(1))) == {(True, True)}
    assert set(all_refuse("0.weight", None)) == {(True, True)}


@everywhere
def test_a_model_on_meta():
    """It is never made whole; nothing runs before its weights are loaded."""
    for path in ("direct", "export", "replay"):
        real = sequence(4) if path == "direct" else Knotty()
        with torch.device("meta"):
            model = sequence(4) if path == "direct" else Knotty()
        batch, target = data(8) if path == "direct" else knotty_data(8)
        example = batch.to("meta") if path == "direct" else tuple(tensor.to("meta") for tensor in batch)
        with pipeline(model, example, path=path, loss=F.mse_loss) as pipe:
            for run in (pipe.step, pipe.evaluate, lambda x, _: pipe.forward(x)):
                with pytest.raises(UsageError, match="load_state_dict"):
                    run(batch, target)
            pipe.load_state_dict(real.state_dict())
            assert not list(differences(pipe, pipe.step(batch, target), expected(real, batch, target)))
            assert all(p.is_meta for p in model.parameters())


class Rotating(nn.Module):
    """Has a buffer that no state dict holds, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.arange(1.0, WIDTH + 1), persistent=False)
        self.double()

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.angles


@everywhere
def test_a_buffer_on_meta_that_no_state_holds():
    """Its values cannot be known: that is said, instead of taking zeros."""
    with torch.device("meta"):
        model = nn.Sequential(Rotating(), Rotating())
    real = nn.Sequential(Rotating(), Rotating())
    x, target = data(8)

    def load_and_run():
        with pipeline(model, x.to("meta"), loss=F.mse_loss) as pipe:
            pipe.load_state_dict(real.state_dict())
            pipe.step(x, target)

    with pytest.raises(UsageError, match="angles"):
        load_and_run()


# ---- random numbers


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()))).double()


@everywhere
def test_dropout():
    """The same seed gives the same masks, whatever the schedule and what is kept; another seed gives others."""
    found = []
    x, target = data(8)
    for schedule, keep in [("1f1b", "hold"), ("1f1b", "recompute"), ("1f1b", "offload"), ("gpipe", "recompute")]:
        model = dropping()
        with pipeline(model, x, schedule=schedule, keep=keep, loss=F.mse_loss) as pipe:
            for seed in (5, 5, 6):
                torch.manual_seed(seed)
                losses = [pipe.step(x, target) for _ in range(2)]
                assert losses[0] != losses[1]
                found.append((losses, {name: p.grad.clone() for name, p in pipe.named_parameters()}))
                pipe.zero_grad()
    first = found[0]
    assert found[2][0] != first[0]
    for losses, gradients in [f for place, f in enumerate(found) if place % 3 != 2]:
        assert losses == first[0]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, first[1][name])


def test_micro_batches_draw_different_numbers():
    """Samples that are the same are dropped differently, in one micro-batch and in different ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Dropout(0.5))
    with pipeline(model, torch.ones(8, 64)) as pipe:
        rows = pipe.forward(torch.ones(8, 64))
        assert len({tuple(row.tolist()) for row in rows}) == 8
        assert 0.3 < float((rows > 0).float().mean()) < 0.7


# ---- weights that change within a step


def emulate(modules, optimizers, schedule, x, target):
    """Train one step of a schedule that updates within it, action by action, on one thread; return the loss.

    Each stage keeps all versions of its weights. An action uses the version that the schedule gives it; an update
    applies the gradients since the last one to the newest version. A micro-batch counts by its samples among those of
    its update.
    """
    sizes = [len(x) // schedule.num_mbs + (mb < len(x) % schedule.num_mbs) for mb in range(schedule.num_mbs)]
    sizes = [size for size in sizes if size]
    xs, targets = x.split(sizes), target.split(sizes)
    versions = [[copied(module)] for module in modules]
    sums = [{} for _ in modules]
    made, gradient_of, losses = {}, {}, {}
    group_of = update_groups(schedule)
    at = [0] * schedule.num_lanes
    last = len(modules) - 1

    def can_run(kind, s, mb):
        if kind == "F":
            return s == 0 or (s - 1, mb) in made
        return kind == "U" or s == last or (s, mb) in gradient_of

    def run(kind, s, mb, version):
        if kind == "F":
            given = (xs[mb] if s == 0 else made[s - 1, mb][1].detach()).requires_grad_(s > 0)
            output = functional_call(modules[s], versions[s][version], (given,))
            if s == last:
                output = F.mse_loss(output, targets[mb])
                losses[mb] = output.detach() * sizes[mb] / sum(sizes)
            made[s, mb] = given, output
        elif kind == "B":
            given, output = made[s, mb]
            own = versions[s][version]
            share = sizes[mb] / sum(sizes[m] for m in group_of[mb] if m < len(sizes))
            seed = torch.tensor(share, dtype=output.dtype) if s == last else gradient_of[s, mb]
            wanted = [*own.values(), *([given] if s else [])]
            gradients = torch.autograd.grad(output, wanted, seed)
            for name, gradient in zip(own, gradients, strict=False):
                sums[s][name] = sums[s].get(name, 0) + gradient
            if s:
                gradient_of[s - 1, mb] = gradients[-1]
        else:
            for name, p in modules[s].named_parameters():
                p.grad = sums[s].pop(name, None)
            optimizers[s].step()
            assert version == len(versions[s])
            versions[s].append(copied(modules[s]))

    while any(place < len(lane) for place, lane in zip(at, schedule.lanes, strict=True)):
        before = list(at)
        for number, lane in enumerate(schedule.lanes):
            while at[number] < len(lane):
                action = lane[at[number]]
                is_there = action.mb < len(sizes) or str(action.kind.name) == "U"
                if is_there and not can_run(action.kind.name, action.stage, action.mb):
                    break
                if is_there:
                    run(action.kind.name, action.stage, action.mb, schedule.version(number, at[number]))
                at[number] += 1
        assert at != before
    return sum(losses.values())


def copied(module):
    return {name: p.detach().clone().requires_grad_(True) for name, p in module.named_parameters()}


def update_groups(schedule):
    """Return for each micro-batch those that are in the same update as it, on the last stage."""
    groups, now = {}, []
    for action in schedule.lanes[-1]:
        if action.kind.name == "B":
            now.append(action.mb)
        elif action.kind.name == "U":
            groups.update(dict.fromkeys(now, now))
            now = []
    return groups


def pipedreams(lanes):
    build = penstock.schedules.build
    return [
        build("pipedream", lanes=lanes, micro_batches=5),
        build("pipedream_2bw", lanes=lanes, micro_batches=6),
        replace(build("pipedream_2bw", lanes=lanes, micro_batches=8, update_every=lanes + 1), name="2bw"),
    ]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def stage_modules(count):
    """Return a sequence as so many stage modules."""
    parts = list(sequence(4))
    size = -(-len(parts) // count)
    return [nn.Sequential(*parts[place : place + size]) for place in range(0, len(parts), size)]


def check_versions(schedule, keep="hold"):
    """Train steps of a schedule that updates within them, and compare losses and weights with the emulation's."""
    modules, plain = stage_modules(schedule.num_lanes), stage_modules(schedule.num_lanes)
    own = [momentum(module.parameters()) for module in plain]
    with penstock.Pipeline(
        modules, example=data(10)[0], loss=F.mse_loss, schedule=schedule, optimizer=momentum, keep=keep, timeout=20
    ) as pipe:
        for seed, size in enumerate((10, 12, 3, 10)):
            x, target = data(size, seed=seed)
            wanted = emulate(plain, own, schedule, x, target)
            torch.testing.assert_close(pipe.step(x, target), wanted, rtol=1e-10, atol=1e-10)
            for optimizer in [*own, *pipe.optimizers.values()]:  # a learning rate that changes between steps
                optimizer.param_groups[0]["lr"] *= 0.7
        state = nn.ModuleList(plain).state_dict()
        for name, tensor in pipe.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=1e-10, atol=1e-10)
        x, target = data(8)
        torch.testing.assert_close(pipe.evaluate(x, target), F.mse_loss(nn.Sequential(*plain)(x), target))


@pytest.mark.parametrize("keep", ["hold", "recompute", "offload"])
@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_weight_versions(lanes, keep):
    """Each action of pipedream and pipedream_2bw uses the weights that the schedule says."""
    for schedule in pipedreams(lanes):
        check_versions(schedule, keep)


@everywhere
def test_weight_versions_over_lanes():
    for schedule in pipedreams(2):
        check_versions(schedule)


@everywhere
def test_what_updates_need():
    """An optimizer where weights change within the step, and none where they do not; no tied weights."""
    x, _ = data(8)
    with pytest.raises(UsageError, match="optimizer="):
        pipeline(sequence(4), x, schedule="pipedream", loss=F.mse_loss)
    with pytest.raises(UsageError, match="leave it out"):
        pipeline(sequence(4), x, loss=F.mse_loss, optimizer=momentum)
    with pytest.raises(UsageError, match=r"first\.weight"):
        pipeline(Knotty(), knotty_data()[0], schedule="pipedream", loss=F.mse_loss, optimizer=momentum)


# ---- the user's own schedules


def own_schedule():
    """Return one that no builder makes: lane 0 has the outer stages, backwards in odd order, some of them split."""
    return Schedule.of(
        [
            "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3B1 3F2 3I2 0B1 3W2 0B0 0I2 0W2",
            "1F0 2F0 1F1 2F1 1F2 2F2 2B0 2I1 1B1 2W1 1B0 2B2 1B2",
        ],
        name="own",
    )


@everywhere
def test_a_schedule_of_the_users_own():
    model = Knotty()
    with pipeline(model, knotty_data()[0], schedule=own_schedule(), path="replay", loss=F.mse_loss) as pipe:
        for size in (8, 10, 2):
            batch, target = knotty_data(size)
            assert not list(differences(pipe, pipe.step(batch, target), expected(model, batch, target)))
            pipe.zero_grad()
        plain = model.eval()(*batch)
        torch.testing.assert_close(pipe.eval().forward(batch), plain)


@everywhere
def test_a_schedule_from_a_file():
    """As a path or as text; with versions of weights too."""
    model = sequence(8)
    x, target = data(10)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("zb_v", "own", "dualpipe"):
            schedule = own_schedule() if name == "own" else penstock.schedules.build(name, lanes=2, micro_batches=4)
            path = Path(folder) / f"{name}.csv"
            schedule.to_csv(path)
            cuts = [4 * s for s in range(1, schedule.num_stages)]
            for given in (path, str(path)):
                with penstock.Pipeline(
                    model, example=x, loss=F.mse_loss, schedule=given, lanes=2, cuts=cuts, timeout=20
                ) as pipe:
                    assert not list(differences(pipe, pipe.step(x, target), expected(model, x, target)))
                    pipe.zero_grad()
        path = Path(folder) / "versions.csv"
        penstock.schedules.build("pipedream_2bw", lanes=2, micro_batches=6).to_csv(path)
        check_versions(penstock.schedules.load_csv(path))
    with pytest.raises(UsageError, match="lanes"):
        penstock.Pipeline(model, example=x, schedule=own_schedule(), lanes=3, loss=F.mse_loss)


@pytest.mark.parametrize("path", ["direct", "export", "replay"])
def test_the_mode_of_the_model_is_followed(path):
    """model.eval() had no effect on the pipeline: dropout went on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)).double()
    x = torch.randn(8, 6).double()
    with penstock.Pipeline(
        model, example=x, loss=nn.MSELoss(), lanes=2, micro_batches=2, cuts=[1], capture_path=path
    ) as pipe:
        pipe.step(x, x)
        model.eval()
        torch.testing.assert_close(pipe(x), model(x).detach())
        with pytest.raises(UsageError, match="the pipeline is in evaluation"):
            pipe.step(x, x)
        model.train()
        assert not torch.allclose(pipe(x), pipe(x))
        pipe.eval()  # the pipeline's own word counts until the model's mode changes again
        assert torch.equal(pipe(x), pipe(x))
        pipe.train()
        pipe.step(x, x)
