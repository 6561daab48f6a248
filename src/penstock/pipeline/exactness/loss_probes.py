"""Probes: outputs that training may lead to, on which a loss is tried in addition to the current outputs.

A loss may leave out samples depending on their own loss (a threshold, hard examples only). A fresh model gets all
samples wrong, so nothing is left out, and the loss looks like a mean over samples. Probes take steps of gradient
descent on the outputs, longer for some samples than for others. They show how the loss behaves later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from penstock.pipeline.exactness.scoring import Run, Scored, score_losses
from penstock.runtime.deterministic import Deterministic
from penstock.runtime.losses import LossFunction
from penstock.runtime.micro_batches import join_dim_of

_STEPS = 5  # of descent, per choice of step sizes
_SECONDS = 2.0  # for all steps: a loss may be slow
_MOST_ELEMENTS = 1 << 24  # of all outputs; with more, a probe takes too much time and GPU memory
_SMALLEST = 1e-3  # relative to the loss at the start; below it, rounding dominates


def probe_tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference of losses due to rounding; leaving out a sample makes a much larger one."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)


def probes(
    loss: LossFunction, runs: Sequence[Run], targets: Sequence[tuple[object, ...]], *, sizes: Sequence[int], dim: int
) -> Iterator[list[Scored]]:
    """Yield the losses of a whole and its parts, with gradients, on outputs that approach the targets step by step.

    Args:
        loss: the user's loss function.
        runs: the outputs of the model for the whole, and for its parts.
        targets: the target of each run.
        sizes: the number of samples in each part.
        dim: the dimension of samples in the batch.
    """
    whole = runs[0]
    if sum(tensor.numel() for tensor in whole.tensors) > _MOST_ELEMENTS:
        return
    end = time.monotonic() + _SECONDS
    for speeds in _step_sizes(sum(sizes)):
        now = runs
        start = 0.0
        for _ in range(_STEPS):
            scored = score_losses(loss, now, targets, Deterministic())
            if isinstance(scored, str):
                break
            if now is not runs:
                yield scored
            start = start or abs(float(scored[0].loss))
            if time.monotonic() > end or abs(float(scored[0].loss)) <= _SMALLEST * start:
                break
            now = _after_descent(now, scored[0], speeds, sizes, dim)
        if time.monotonic() > end:
            return


def _step_sizes(count: int) -> Iterator[list[float]]:
    """Yield the relative step size of each sample: first 0 and 1 in turn, then a different size for each."""
    yield [float(number % 2) for number in range(count)]
    yield [(number + 1) / count for number in range(count)]


def _after_descent(
    runs: Sequence[Run], scored: Scored, speeds: Sequence[float], sizes: Sequence[int], dim: int
) -> list[Run]:
    """Return the outputs after one step down the gradient.

    The step is 0.8 of the one that would bring a linear loss to zero.
    """
    norm = sum(float(g.double().pow(2).sum()) for g in scored.gradients if g is not None)
    rate = 0.8 * abs(float(scored.loss)) / max(norm, 1e-30)
    made = [list(run.tensors) for run in runs]
    for number, gradient in enumerate(scored.gradients):
        whole = made[0][number]
        parts = [tensors[number] for tensors in made[1:]]
        own = join_dim_of(parts, sizes, dim)
        if gradient is None or own is None or whole.shape[own] != sum(sizes):
            continue
        shape = [1] * whole.dim()
        shape[own] = len(speeds)
        pace = torch.tensor(speeds, device=whole.device, dtype=whole.dtype).view(shape)
        moved = whole.detach() - rate * gradient * pace
        made[0][number] = moved
        for tensors, part in zip(made[1:], torch.split(moved, list(sizes), own), strict=True):
            tensors[number] = part
    return [replace(run, tensors=tensors) for run, tensors in zip(runs, made, strict=True)]
