"""Pipelines: the models and the comparison that tests of the runtime share; also imported by their processes."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import nn

import penstock
from cases import build_or_none
from penstock.errors import PenstockError
from penstock.model.capture.capture import capture as real_capture

WIDTH = 6
MICRO_BATCHES = 4


class Knotty(nn.Module):
    """Skips, a tied weight, a frozen one, one that is never used, a buffer, several inputs, one without a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.double()

    def forward(self, x, scale):
        skip = self.first(x)
        self.count += 1
        h = skip
        for index, block in enumerate(self.blocks):
            h = torch.tanh(block(h)) * scale
            if index == 6:
                h = self.frozen(h)
            if index == 8:
                h = h + skip
        return nn.functional.linear(h, self.first.weight) + skip.mean(1, keepdim=True)


def sequence(count=16):
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()


def data(size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


@cache
def kept_capture(model, path, training, num_stages):
    return real_capture(model, kept_capture.example, training=training, path=path, num_stages=num_stages)


def once(model, example, *, training=None, path="auto", num_stages=None):
    """Capture a model once for many pipelines."""
    kept_capture.example = example
    return kept_capture(model, path, training, num_stages)


def cuts_of(graph, num_stages):
    allowed = [c for c in range(1, len(graph.nodes)) if c not in graph.uncuttable]
    assert len(allowed) >= num_stages - 1
    return tuple(sorted({allowed[len(allowed) * k // num_stages] for k in range(1, num_stages)}))


def expected(model, batch, target, loss=nn.functional.mse_loss):
    """Return the plain model's loss and gradients."""
    plain = copy.deepcopy(model)
    plain.zero_grad(set_to_none=True)
    value = loss(plain(*batch) if isinstance(batch, tuple) else plain(batch), target)
    value.backward()
    return value.detach(), {name: p.grad for name, p in plain.named_parameters()}


def differences(pipe, loss, wanted, tolerance=1e-10):
    """Yield in what a step differs from the plain model."""
    plain_loss, gradients = wanted
    if not torch.allclose(loss, plain_loss, rtol=tolerance, atol=tolerance):
        yield f"loss {float(loss)} for {float(plain_loss)}"
    for name, parameter in pipe.named_parameters():
        want, got = gradients[name], parameter.grad
        if (want is None or not want.any()) and (got is None or not got.any()):
            continue
        if got is None or want is None or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
            yield f"gradient of {name}"


def faults_of(model, name, lanes, keep, *, sizes=(8, 10, 3), path="auto", **options):
    """Return in what a pipeline differs from the plain model, for batches of some sizes."""
    schedule = build_or_none(name, lanes, MICRO_BATCHES)
    if schedule is None:
        return []
    is_knotty = isinstance(model, Knotty)
    scale = torch.tensor(0.9, dtype=torch.float64)

    def batch_of(x):
        return (x, scale) if is_knotty else x

    captured = once(model, batch_of(data(8)[0]), training=True, path=path, num_stages=schedule.num_stages)
    cuts = cuts_of(captured.graph, schedule.num_stages)
    found = []
    try:
        with penstock.Pipeline(
            captured, example=batch_of(data(8)[0]), loss=nn.functional.mse_loss, schedule=schedule, cuts=cuts,
            keep=keep, timeout=30, capture_path=path, **options,
        ) as pipe:  # fmt: skip
            for size in sizes:
                x, target = data(size, seed=size)
                wanted = expected(model, batch_of(x), target)
                pipe.zero_grad()
                loss = pipe.step(batch_of(x), target)
                found += [f"{name} {lanes} {keep} batch {size}: {d}" for d in differences(pipe, loss, wanted)]
    except PenstockError as error:
        found.append(f"{name} {lanes} {keep}: {type(error).__name__}: {error}")
    model.zero_grad(set_to_none=True)
    return found
