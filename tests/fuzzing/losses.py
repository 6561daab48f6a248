"""Random losses: all of torch's with their reductions and weights, functions around them, and coupled ones."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

OUTPUTS = 4
_WEIGHTS = torch.tensor([0.2, 1.7, 0.6, 0.01]).double()


def regression(rng, shape):
    """Return a loss of numbers, and a target."""
    target = torch.randn(shape).double()
    reduction = rng.choice(["mean", "sum"])
    kinds = {
        "MSELoss": nn.MSELoss(reduction=reduction),
        "L1Loss": nn.L1Loss(reduction=reduction),
        "SmoothL1Loss": nn.SmoothL1Loss(reduction=reduction),
        "HuberLoss": nn.HuberLoss(reduction=reduction),
        "mse_loss": functools.partial(F.mse_loss, reduction=reduction),
        "own mean": lambda o, t: (o - t).abs().mean(),
        "own sum": lambda o, t: (o - t).square().sum() / 3,
        "PoissonNLLLoss": nn.PoissonNLLLoss(reduction=reduction),
    }
    name = rng.choice(sorted(kinds))
    return f"{name} {reduction}", kinds[name], target


def probabilities(rng, shape):
    """Return a loss of targets between 0 and 1, and a target."""
    reduction = rng.choice(["mean", "sum"])
    kinds = {
        "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(reduction=reduction, pos_weight=_WEIGHTS),
        "SoftMarginLoss": nn.SoftMarginLoss(reduction=reduction),
        "MultiLabelSoftMarginLoss": nn.MultiLabelSoftMarginLoss(reduction=reduction),
        "KLDivLoss": lambda o, t: nn.KLDivLoss(reduction="batchmean")(o.log_softmax(-1), t.softmax(-1)),
    }
    name = rng.choice(sorted(kinds))
    return f"{name} {reduction}", kinds[name], torch.rand(shape).double()


def classes(rng, shape):
    """Return a loss of classes, some of them ignored, and a target."""
    flat = len(shape) == 2
    ignored = rng.choice([-100, 0, 2])
    target = torch.randint(OUTPUTS, shape[:-1])
    if ignored != -100 or rng.random() < 0.7:
        target = target.where(torch.rand(target.shape) > 0.4, ignored)
    target.view(-1)[-1] = 1  # something is left
    weight = _WEIGHTS if rng.random() < 0.5 else None
    reduction = rng.choice(["mean", "mean", "sum"])
    smoothing = rng.choice([0.0, 0.0, 0.1])
    given = {"weight": weight, "ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
    name = f"cross entropy weight={weight is not None} ignored={ignored} {reduction} smoothing={smoothing}"
    if flat:
        kind = rng.choice(["module", "function", "own"])
        loss = {
            "module": nn.CrossEntropyLoss(**given),
            "function": functools.partial(F.cross_entropy, **given),
            "own": lambda o, t: F.cross_entropy(o, t, **given),
        }[kind]
        return f"{kind} {name}", loss, target
    return f"tokens {name}", lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), **given), target


def masked(rng, shape):
    """Return a mean over a mask that is part of the target."""
    mask = (torch.rand(shape) > 0.5).double()
    mask.view(-1)[-1] = 1
    return (
        "masked mean",
        lambda o, t: ((o - t[0]).square() * t[1]).sum() / t[1].sum(),
        (torch.randn(shape).double(), mask),
    )


def coupled(rng, shape):
    """Return a loss that no weights can express."""
    target = torch.randn(shape).double()
    kinds = {
        "root": lambda o, t: (o - t).square().mean().sqrt(),
        "deviation": lambda o, t: (o - t).std(),
        "log": lambda o, t: (o - t).abs().mean().log(),
        "contrast": lambda o, t: F.cross_entropy(
            F.normalize(o.flatten(1), dim=1) @ F.normalize(t.flatten(1), dim=1).T, torch.arange(len(o))
        ),
    }
    name = rng.choice(sorted(kinds))
    return f"coupled {name}", kinds[name], target


def random_loss(rng, shape):
    """Return a name, a loss of (output, target), a target, and whether the loss couples samples."""
    make = rng.choice([regression, probabilities, classes, classes, masked, coupled])
    name, loss, target = make(rng, shape)
    return name, loss, target, make is coupled
