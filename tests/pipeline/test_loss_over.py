"""Losses that see the whole batch, weights that are found, and what a loss returns beside itself."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import penstock
from penstock.errors import UsageError
from penstock.pipeline import batch_reader as batch_module
from pipelines import differences, expected
from runtime_everywhere import everywhere, pipeline

SIZE = 10


def features(rows=SIZE, seed=1):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Towers(nn.Module):
    """Two towers and a temperature, as in CLIP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.text = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.double()

    def forward(self, image, text):
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return {"image": image, "text": text, "scale": self.temperature.exp()}


def contrast(output, target=None):
    logits = output["scale"] * output["image"] @ output["text"].T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def pairs():
    return features(), features(seed=2)


@pytest.mark.slow
@everywhere
def test_two_towers_that_a_loss_couples():
    """A contrastive loss was off by 100 %: each micro-batch had only its own samples to compare with."""
    model = Towers()
    wanted = expected(model, pairs(), None, contrast)
    for schedule, keep in itertools.product(["gpipe", "zb_gpipe", "looped_bfs"], ["hold", "recompute", "except_last"]):
        with pipeline(model, pairs(), schedule=schedule, loss=contrast, loss_over="batch", keep=keep) as pipe:
            pipe.zero_grad()
            assert not list(differences(pipe, pipe.step(pairs()), wanted)), (schedule, keep)
            torch.testing.assert_close(pipe.evaluate(pairs()), wanted[0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: (output - target).square().mean().sqrt(),
        lambda output, target: (output - target).std(),
        lambda output, target: ((output - target).square() * (target > 0)).sum() / (target > 0).sum(),
        lambda output, target: -torch.corrcoef(torch.stack([output.flatten(), target.flatten()]))[0, 1],
    ],
    ids=["root", "deviation", "mask", "correlation"],
)
def test_losses_over_the_batch(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch, target = features(), torch.randn(SIZE, 3).double()
    plain = copy.deepcopy(model)
    wanted = loss(plain(batch), target)
    wanted.backward()
    with penstock.Pipeline(model, example=batch, loss=loss, lanes=2, micro_batches=4, loss_over="batch") as pipe:
        assert pipe.schedule.name == "zb_gpipe"
        torch.testing.assert_close(pipe.step(batch, target), wanted.detach())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_scaler_scales_the_loss_over_the_batch():
    """Its factor goes into the backward of the loss: behind it, gradients of 16 bits would be gone."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch, target = features(), torch.zeros(SIZE, 3).double()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with penstock.Pipeline(
        model, example=batch, loss=lambda o, t: (o - t).std(), lanes=2, micro_batches=3, loss_over="batch",
        scaler=scaler, cuts=[1],
    ) as pipe:  # fmt: skip
        pipe.step(batch, target)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    (8 * (plain(batch) - target).std()).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Mixing(nn.Module):
    """Returns one row for every pair of samples."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8).double(), nn.Linear(8, 8).double()

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return x, x @ x.T


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f1b"}, "needs a schedule in which the last stage runs all its forwards"),
        ({"schedule": "chimera"}, "use zb_gpipe, gpipe or looped_bfs"),
        ({"loss_over": "epoch"}, "loss_over: 'epoch' is not one of micro_batch, batch"),
        ({"weight": "sum"}, "weight: has no effect"),
        ({"loss": None}, "needs loss="),
    ],
)
def test_what_a_loss_over_the_batch_cannot_be(options, message):
    given = {"loss": lambda o, t: (o - t).std(), "loss_over": "batch", "lanes": 2, "micro_batches": 4} | options
    with pytest.raises(UsageError, match=message):
        penstock.Pipeline(nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double(), example=features(), **given)


def test_an_output_that_cannot_be_joined_is_refused_where_the_loss_reads_it():
    for loss, message in (
        (lambda out, target: out[1].std(), "loss_over"),
        (lambda out, target: F.cross_entropy(out[1], torch.arange(len(out[1]))), "loss_over"),
    ):
        with (
            penstock.Pipeline(
                Mixing(), example=features(), loss=loss, lanes=2, micro_batches=4, loss_over="batch"
            ) as p,
            pytest.raises((UsageError, penstock.errors.LaneError), match=message),
        ):
            p.step(features(), features())


def test_explain_says_what_a_loss_over_the_batch_holds():
    with penstock.Pipeline(
        Towers(), example=pairs(), loss=contrast, lanes=2, micro_batches=4, loss_over="batch"
    ) as pipe:
        assert "loss over the whole batch" in str(pipe.explain())


# ---- weights that are found


def compare(loss, target, *, rows=SIZE, outputs=5, micro_batches=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs)).double()
    batch = features(rows)
    plain = copy.deepcopy(model)
    wanted = loss(plain(batch), target)
    wanted.backward()
    with penstock.Pipeline(model, example=batch, loss=loss, lanes=2, micro_batches=micro_batches) as pipe:
        torch.testing.assert_close(pipe.step(batch, target), wanted.detach())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def labels(*ignored, value):
    found = torch.randint(1, 5, (SIZE,), generator=torch.Generator().manual_seed(3))
    found[list(ignored)] = value
    return found


WEIGHTS = torch.tensor([0.2, 0.03, 0.9, 1.9, 0.01]).double()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (lambda o, t: F.cross_entropy(o, t, ignore_index=0), labels(0, 1, 4, value=0)),
        (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS, ignore_index=0), labels(0, 1, 4, value=0)),
        (lambda o, t: F.cross_entropy(o, t, weight=WEIGHTS), labels(0, 1, 4, value=-100)),
        (lambda o, t: F.cross_entropy(o, t["y"], reduction="sum") / 7, {"y": labels(value=0)}),
    ],
    ids=["padding 0", "weights and padding", "weights", "sum over a constant"],
)
def test_classes_that_a_function_of_ones_own_leaves_out(loss, target):
    """Only torch's own loss objects told what they ignore; a function around them counted by samples."""
    compare(loss, target)


def flattened(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
        ),
    ],
)
@pytest.mark.parametrize(
    ("loss", "is_flat"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=0), True),
        (lambda o, t: 3 * F.cross_entropy(o, t), True),
        (flattened, False),
        (lambda o, t: F.cross_entropy(o, t) + 0.1 * F.cross_entropy(2 * o, t), True),
    ],
    ids=["module", "smoothed", "function", "tokens", "two"],
)
def test_labels_on_a_gpu_are_counted_there(loss, is_flat, device, monkeypatch):
    """The host waited for the counts of every step; now losses are summed, and divided by a count on the device."""
    if device == "cpu":
        monkeypatch.setattr(batch_module, "_needs_sync", lambda tensor: True)
        monkeypatch.setattr(batch_module, "counts_of", None)  # what would wait
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double().to(device)
    batch = torch.randn(SIZE, *(() if is_flat else (3,)), 6).double().to(device)
    target = torch.randint(5, batch.shape[:-1]).to(device)
    target[:3] = 0 if getattr(loss, "ignore_index", -100) == 0 else -100  # the first micro-batch counts nothing
    target[5] = 1
    plain = copy.deepcopy(model)
    wanted = loss(plain(batch), target)
    wanted.backward()
    with penstock.Pipeline(model, example=batch, loss=loss, micro_batches=4, cuts=[1], devices=[device] * 2) as pipe:
        for _ in range(4):
            pipe.zero_grad()
            torch.testing.assert_close(pipe.step(batch, target), wanted.detach())
            for one, other in zip(plain.parameters(), pipe.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(pipe.evaluate(batch, target), wanted.detach())


def test_a_mean_over_a_mask_in_the_target():
    mask = torch.rand(SIZE, 5, generator=torch.Generator().manual_seed(4)) > 0.6
    target = (torch.randn(SIZE, 5).double(), mask.double())
    compare(lambda o, t: ((o - t[0]).square() * t[1]).sum() / t[1].sum(), target)


def test_a_mask_that_begins_to_leave_something_out_later():
    """In the first batch nothing is masked, so a mean over samples is exact; in the second it is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()

    def loss(o, t):
        return ((o - t[0]).square() * t[1]).sum() / t[1].sum()

    target, mask = torch.randn(SIZE, 5).double(), torch.ones(SIZE, 5).double()
    with penstock.Pipeline(model, example=features(), loss=loss, lanes=2, micro_batches=4, cuts=[1]) as pipe:
        pipe.step(features(), (target, mask))
        pipe.zero_grad()
        mask[:4, 1:] = 0
        wanted = loss(model(features()), (target, mask))
        torch.testing.assert_close(pipe.step(features(), (target, mask)), wanted.detach())


def test_a_weight_of_the_users_own_that_is_wrong_is_refused():
    with (
        penstock.Pipeline(
            nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).double(), example=features(), loss=F.cross_entropy,
            lanes=2, micro_batches=4, weight=lambda batch, target: len(target), cuts=[1],
        ) as pipe,
        pytest.raises(UsageError, match="under weight="),
    ):  # fmt: skip
        pipe.step(features(), labels(0, 1, 4, value=-100))


def test_a_loss_that_cannot_be_compared_says_so():
    def loss(o, t):
        return (o - t).square().mean() + 0 * torch.randperm(3).sum()

    with penstock.Pipeline(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).double(), example=features(), loss=loss, lanes=2,
        micro_batches=4, cuts=[1],
    ) as pipe:  # fmt: skip
        pipe.step(features(), torch.zeros(SIZE, 5).double())  # which may end with an error that says more
        with pytest.warns(UserWarning, match="could not be compared .*: it draws random numbers"):
            pipe.step(features(), torch.zeros(SIZE, 5).double())


# ---- what a loss returns beside itself


def with_accuracy(output, target):
    return F.cross_entropy(output, target), {"accuracy": (output.argmax(1) == target).double().mean(), "one": 1}


@everywhere
def test_metrics_of_the_batch():
    """What a loss returned beside the loss was dropped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    target = labels(value=0)
    wanted, metrics = with_accuracy(model(features()), target)
    with pipeline(model, features(), loss=with_accuracy) as pipe:
        for call in (pipe.step, pipe.evaluate):
            loss, found = call(features(), target, metrics=True)
            torch.testing.assert_close(loss, wanted.detach())
            assert found.keys() == {"accuracy", "one"}
            assert found["accuracy"].item() == pytest.approx(metrics["accuracy"].item())
            assert found["one"].item() == pytest.approx(1)
        torch.testing.assert_close(pipe.step(features(), target), wanted.detach())


def test_metrics_of_a_loss_over_the_batch():
    def loss(output, target):
        return {"loss": (output - target).std(), "largest": output.max()}

    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).double()
    target = torch.zeros(SIZE, 5).double()
    with penstock.Pipeline(
        model, example=features(), loss=loss, lanes=2, micro_batches=3, loss_over="batch", cuts=[1]
    ) as pipe:
        _, found = pipe.step(features(), target, metrics=True)
    assert found["largest"].item() == pytest.approx(model(features()).max().item())
