"""Losses that look like a mean over samples today, and are none: refused, or exact, never silently different."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import penstock
from penstock.errors import LaneError, UsageError
from penstock.pipeline.smaller_micro_batches import split_finer
from penstock.runtime import deterministic as still
from penstock.runtime.deterministic import Deterministic

WIDTH, SIZE = 6, 12


def network(out=5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, out)).double()


def rows(size=SIZE, width=WIDTH):
    return torch.randn(size, width, dtype=torch.float64)


def trained(loss, target_of, *, steps=30, out=5, **options):
    """Train a pipeline, and compare each step with the plain model on the same weights."""
    model = network(out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = rows()
    with penstock.Pipeline(model, example=x, loss=loss, lanes=2, **({"micro_batches": 4} | options)) as pipe:
        for step in range(steps):
            x = rows()
            target = target_of(x, step)
            plain = copy.deepcopy(model)
            plain.zero_grad()
            wanted = loss(plain(x), target)
            wanted.backward()
            optimizer.zero_grad()
            torch.testing.assert_close(pipe.step(x, target), wanted.detach(), rtol=1e-9, atol=1e-12)
            for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, other.grad, rtol=1e-8, atol=1e-10)
            optimizer.step()


def classes(x, step):
    del step
    return x[:, :5].argmax(1)


def numbers(x, step):
    del step
    return x[:, :5].sin()


def hard_examples(output, target):
    """A fresh model has no easy ones."""
    each = F.cross_entropy(output, target, reduction="none")
    hard = each > 0.3
    return each[hard].mean() if hard.any() else each.mean()


def hard_share(output, target):
    each = F.cross_entropy(output, target, reduction="none")
    hard = (each > 0.2).double()
    return (each * hard).sum() / hard.sum().clamp(min=1)


@pytest.mark.parametrize("loss", [hard_examples, hard_share])
def test_a_loss_that_leaves_easy_samples_out_is_refused_in_the_first_step(loss):
    """Nothing is easy for a fresh model, so the check passed, and from the seventh step on gradients were wrong."""
    with pytest.raises(UsageError, match=r"once it has learnt some of the samples.*loss_over='batch'"):
        trained(loss, classes)


@pytest.mark.parametrize("loss", [hard_examples, hard_share])
def test_over_the_whole_batch_it_is_exact(loss):
    trained(loss, classes, loss_over="batch")


def without_nan(output, target):
    kept = ~target.isnan()
    return ((output - target.nan_to_num()).pow(2) * kept).sum() / kept.sum()


def test_a_mean_over_what_is_not_nan_is_exact_from_the_batch_on_that_has_nan():
    """It was wrong from such a batch on until the next look, steps later."""

    def with_nan(x, step):
        target = numbers(x, step)
        if step >= 5:
            target[:4, :3] = float("nan")
        return target

    trained(without_nan, with_nan)


def weighted_by_last(output, target):
    weight = target[:, -1:].abs()
    return ((output[:, :4] - target[:, :4]).pow(2) * weight).sum() / (4 * weight.sum())


def test_weights_that_are_packed_into_the_target_are_refused_while_all_are_one():
    with pytest.raises(UsageError, match="but not for one with zeros"):
        trained(weighted_by_last, lambda x, step: torch.cat([numbers(x, step)[:, :4], torch.ones(len(x), 1)], 1))


def test_plain_means_pass_the_probes():
    """Also where the loss takes only some numbers, and where it becomes tiny."""

    def likelihood(output, target):
        return F.binary_cross_entropy(output.sigmoid(), target.abs().clamp(0, 1))

    def clamped(output, target):
        return (output - target).abs().clamp(max=1.0).mean()

    trained(likelihood, numbers)
    trained(clamped, numbers)
    trained(lambda output, target: F.cross_entropy(20 * output, target), classes)
    trained(lambda output, target: (1 - F.cosine_similarity(output, target)).mean(), numbers)
    trained(lambda output, target: F.smooth_l1_loss(output, target, reduction="sum"), numbers)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.L1Loss(), F.mse_loss, nn.HuberLoss()], ids=["mse", "l1", "function", "huber"]
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_target_that_is_broadcast_is_refused(loss):
    """Each sample met the targets of all others: torch's own losses were not compared."""
    with pytest.raises(UsageError, match=r"The target \(5,\) is broadcast against the output \(5, 1\)"):
        trained(loss, lambda x, _: x.sum(1), out=1)
    trained(loss, lambda x, _: x.sum(1, keepdim=True), out=1, steps=2)
    trained(loss, lambda x, _: x.sum(1), out=1, steps=2, micro_batches=1)


@pytest.mark.parametrize("name", ["weight", "reduction", "ignore_index"])
def test_a_loss_whose_settings_are_replaced_is_refused(name):
    """They were read once: a weight for each epoch was ignored."""
    loss = nn.CrossEntropyLoss()
    with penstock.Pipeline(network(), example=rows(), loss=loss, lanes=2, micro_batches=4) as pipe:
        x = rows()
        pipe.step(x, classes(x, 0))
        setattr(loss, name, {"weight": torch.rand(5).double(), "reduction": "sum", "ignore_index": 0}[name])
        with pytest.raises(UsageError, match="was replaced after the pipeline was made"):
            pipe.step(x, classes(x, 0))


def test_a_weight_that_is_changed_in_place_is_followed():
    loss = nn.CrossEntropyLoss(weight=torch.ones(5).double())

    def changing(x, step):
        loss.weight.copy_(torch.linspace(1, 1 + step, 5))
        return classes(x, step)

    trained(loss, changing, steps=3)


def test_one_of_torchs_losses_with_a_hook_is_compared_as_any_other():
    """What it averages over was read off its type."""
    hooked = nn.CrossEntropyLoss()
    hooked.register_forward_hook(lambda module, args, output: output**2)
    replaced = nn.MSELoss()
    replaced.forward = lambda output, target: (output - target).pow(2).mean().sqrt()
    with pytest.raises(UsageError, match="couples samples"):
        trained(hooked, classes)
    with pytest.raises(UsageError, match="couples samples"):
        trained(replaced, numbers)


class Average(nn.Module):
    """A loss relative to its own running average."""

    def __init__(self):
        super().__init__()
        self.average = 1.0

    def forward(self, output, target):
        loss = F.mse_loss(output, target)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average


def test_a_loss_that_changes_with_each_call_is_refused():
    """It was said to draw random numbers, and its gradients were wrong by a third."""
    with pytest.raises(UsageError, match="the loss changes with each call"):
        trained(Average(), numbers)


class Pairs(nn.Module):
    """Returns a number for each pair of samples, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.left, self.right = network(), network()

    def forward(self, x):
        return self.left(x) @ self.right(x).T


class Contrasting(Pairs):
    """Computes the loss of these itself."""

    def forward(self, x):
        return {"loss": F.cross_entropy(super().forward(x), torch.arange(len(x)))}


@pytest.mark.parametrize(("kind", "loss"), [(Pairs, nn.CrossEntropyLoss()), (Contrasting, None)])
def test_a_model_that_mixes_samples_runs_in_one_micro_batch_or_is_refused(kind, loss):
    """Nothing but one micro-batch is exact for it as it is: so it is, where the user did not say how many."""
    model, x = kind(), rows()
    target = () if loss is None else (torch.arange(SIZE),)
    plain = copy.deepcopy(model)
    wanted = plain(x)["loss"] if loss is None else loss(plain(x), *target)
    wanted.backward()
    with pytest.warns(UserWarning, match="only one micro-batch per step runs"):
        pipe = penstock.Pipeline(model, example=x, loss=loss, lanes=2)
    with pipe:
        assert pipe.schedule.num_mbs == 1
        torch.testing.assert_close(pipe.step(x, *target), wanted.detach(), rtol=1e-12, atol=0)
        for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, other.grad, rtol=1e-10, atol=1e-12)
        assert not split_finer(pipe)  # out of memory or not: two would not be exact
    with pytest.raises(UsageError, match="micro_batches=1"):
        penstock.Pipeline(kind(), example=x, loss=loss, lanes=2, micro_batches=4)


def test_a_dict_that_the_model_takes_as_one_argument_is_explained():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, batch):
            return self.inner(batch["x"])

    with pytest.raises(UsageError, match=r"forward has no argument x; it takes: batch.*pass \(batch,\)"):
        penstock.Pipeline(Takes(), example={"x": rows()}, loss=nn.MSELoss(), lanes=2)
    with penstock.Pipeline(Takes(), example=({"x": rows()},), loss=nn.MSELoss(), lanes=2) as pipe:
        x = rows()
        assert pipe.step(({"x": x},), numbers(x, 0)).isfinite()


def test_arguments_that_a_decorator_takes_are_no_mistake():
    """Those of transformers take more keywords than the forward that they wrap."""

    def takes_more(forward):
        @functools.wraps(forward)
        def wrapped(self, *args, more=None, **kwargs):
            del more
            return forward(self, *args, **kwargs)

        return wrapped

    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        @takes_more
        def forward(self, x):
            return self.inner(x)

    with penstock.Pipeline(Decorated(), example={"x": rows(), "more": 1}, loss=nn.MSELoss(), lanes=2) as pipe:
        x = rows()
        assert pipe.step({"x": x, "more": 1}, numbers(x, 0)).isfinite()


def test_batch_norm_that_gets_one_sample_says_how_that_came():
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).double()
    with penstock.Pipeline(model, example=rows(), loss=nn.MSELoss(), lanes=2, micro_batches=4) as pipe:
        x = rows(5)
        with pytest.raises(LaneError, match=r"micro-batches of 2, 1, 1, 1.*drop_last=True"):
            pipe.step(x, numbers(x, 0))


@pytest.mark.filterwarnings("ignore:the loss could not be compared")  # five samples have no weight
def test_a_loss_that_holds_a_weight_for_each_sample_is_refused_by_that_name():
    """Torch spoke of sizes that do not match."""
    loss = nn.BCEWithLogitsLoss(weight=torch.rand(SIZE, 1).double())
    with pytest.raises(UsageError, match=r"its weight \(12, 1\) has an entry for each of the 12 samples"):
        trained(loss, lambda x, step: numbers(x, step).abs())
    trained(loss, lambda x, step: numbers(x, step).abs(), loss_over="batch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_model_in_few_bits_with_a_loss_in_more_is_exact_as_far_as_they_tell(dtype):
    """Its gradients were compared as precisely as its loss, and taken for those of coupled samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 50)).to(dtype)
    words = torch.randint(0, 50, (16, 12))

    def loss(output, target):
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten())

    wanted = loss(model(words), words)
    with penstock.Pipeline(model, example=words, loss=loss, lanes=2, micro_batches=4) as pipe:
        for _ in range(3):
            torch.testing.assert_close(pipe.step(words, words), wanted.detach(), rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "operation",
    [
        lambda device: F.cross_entropy(torch.zeros(2, 3, device=device), torch.tensor([0, -100], device=device)),
        lambda device: F.cross_entropy(
            torch.zeros(2, 3, device=device), torch.tensor([0, -100], device=device), ignore_index=0
        ),
        lambda device: F.embedding(torch.tensor([3, 4], device=device), torch.zeros(4, 2, device=device)),
        lambda device: torch.zeros(3, device=device)[torch.tensor([3], device=device)],
        lambda device: torch.zeros(3, 2, device=device).gather(1, torch.tensor([[-1]], device=device)),
        lambda device: F.binary_cross_entropy(torch.full((2,), 1.5, device=device), torch.ones(2, device=device)),
        lambda device: F.binary_cross_entropy(torch.full((2,), 0.5, device=device), torch.ones(2, device=device)),
        lambda device: torch.zeros(3, device=device).scatter(0, torch.tensor([2], device=device), 1.0),
    ],
)
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
def test_what_a_loss_need_not_take_is_an_exception_on_a_gpu_too(operation, device, monkeypatch):
    """A label that is out of range stops the whole process there, for all that comes after."""

    def outcome(device):
        try:
            with Deterministic():
                operation(device)
        except (IndexError, RuntimeError):
            return "raises"
        return "runs"

    wanted = outcome("cpu")
    if device == "cpu":
        monkeypatch.setattr(still, "_is_on_gpu", lambda tensor: True)
    assert outcome(device) == wanted
    if device == "cuda":
        torch.cuda.synchronize()
