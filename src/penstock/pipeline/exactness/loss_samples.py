"""Loss samples: a few samples of a batch, with its target or with other labels, and probes, to try a loss on."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.model.example import Call
from penstock.model.structure import flatten, rebuild
from penstock.pipeline.exactness.scoring import Run, Scored, parts_of, score_losses
from penstock.runtime.deterministic import Deterministic
from penstock.runtime.loss_weights import IGNORED
from penstock.runtime.losses import LossFunction
from penstock.runtime.micro_batches import batch_dim_of, join_dim_of

FEW = 5  # samples to try, in parts of two and three, since batch norm refuses a single sample
_TRIES = 3  # choices of samples of a target, and random choices of labels
_LABELS = ("label", "target")  # words in the names of inputs that hold labels
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MOST_CLASSES = 4  # of a target from which artificial labels are made

_STEPS = 5  # of descent, per choice of step sizes
_SECONDS = 2.0  # for all steps: a loss may be slow
_MOST_ELEMENTS = 1 << 24  # of all outputs; with more, a probe takes too much time and GPU memory
_SMALLEST = 1e-3  # relative to the loss at the start; below it, rounding dominates


def label_names(call: Call, *, is_split: bool = False) -> list[str]:
    """Return the names of the inputs that may hold labels; if the user splits batches, they need no batch dimension."""
    return [
        name
        for name, tensor, dim in zip(call.names, call.tensors, call.batch_dims, strict=True)
        if (dim is not None or is_split)
        and tensor.dtype in _WHOLE_NUMBERS
        and any(word in name.lower() for word in _LABELS)
    ]


def with_ignored(call: Call, names: Sequence[str]) -> Iterator[tuple[Call, list[Call]]]:
    """Yield a call and its parts: variants with other labels ignored, for each input with labels; last, unchanged."""
    half = call.batch_size // 2
    sizes = [half, call.batch_size - half]
    for name in names:
        place = call.names.index(name)
        changes = list(ignoring([call.tensors[place]])) if call.batch_dims[place] == 0 else []
        for (changed,) in reversed(changes):
            one = replace(call, tensors=(*call.tensors[:place], changed, *call.tensors[place + 1 :]))
            yield one, parts_of(one, sizes)
    yield call, parts_of(call, sizes)


def ignoring(target: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield a target unchanged; if it holds labels, also variants in which other labels are ignored.

    The variants ignore no label, then some of the last sample, then all but the first label in some rows.
    """
    yield list(target)
    labels = target[0] if len(target) == 1 else None
    if not isinstance(labels, torch.Tensor) or labels.dtype not in _WHOLE_NUMBERS:
        return
    labels = labels.where(labels != IGNORED, 0)
    yield [labels]
    if labels.dim() and labels.shape[0] > 1:
        changed = labels.clone()
        last = changed[-1:] if labels.dim() == 1 else changed[-1, ..., : -(-labels.shape[-1] // 2)]
        last.fill_(IGNORED)
        yield [changed]
    if labels.dim() > 1 and labels.shape[0] > 1 and labels.shape[-1] > 1:
        changed = labels.clone()  # this variant shows whether the first label of each row counts
        changed[: labels.shape[0] // 2, ..., 1:] = IGNORED
        yield [changed]


def artificial_labels(target: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield other labels of the same classes as a target: first all of one class, then random ones."""
    labels = target[0] if len(target) == 1 else None
    if not isinstance(labels, torch.Tensor) or labels.dtype not in _WHOLE_NUMBERS or not labels.numel():
        return
    classes: torch.Tensor = torch.unique(labels)[:_MOST_CLASSES]
    for one in classes:
        yield [torch.full_like(labels, int(one))]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_TRIES):
        drawn = torch.randint(len(classes), labels.shape, generator=generator)
        yield [classes[drawn.to(classes.device)]]


def special_values(target: Sequence[Any], first: int, count: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield variants of a target that contain values which a loss may leave out; each comes with the name of the value.

    The target has `count` samples, `first` of them in the first part.
    """
    tensors, template = flatten(list(target), apart=True)
    for place, tensor in enumerate(tensors):
        if not tensor.is_floating_point() or not tensor.dim() or tensor.shape[0] != count:
            continue
        for words, value in (("NaN", float("nan")), ("zeros", 0.0)):
            changed = tensor.clone().contiguous()
            changed[first - 1] = value  # one whole sample of the first part
            changed.view(count, -1)[first, -1] = value  # and the last number of one sample of the second part
            yield words, rebuild(template, [*tensors[:place], changed, *tensors[place + 1 :]])


def as_batch(call: Call) -> Any:  # noqa: ANN401 - a tensor, a tuple or a dict, as the user passes batches
    """Return the batch of a call in the form that a weight function takes."""
    args, kwargs = call.arguments()
    return kwargs if kwargs else args[0] if len(args) == 1 else args


def choices_of_rows(size: int, count: int) -> Iterator[list[int]]:
    """Yield several choices of samples, since two weights may happen to agree on one of them."""
    yield [number * size // count for number in range(count)]
    for seed in range(_TRIES - 1):
        chance = random.Random(seed)  # noqa: S311 - nothing secret
        # in a small batch some samples are chosen twice; the loss cannot see that
        yield chance.sample(range(size), count) if size >= count else chance.choices(range(size), k=count)


def rows_of(thing: Any, size: int, rows: Sequence[int], dim: int) -> Any:  # noqa: ANN401 - a structure of tensors
    """Return some samples of a target; tensors without a batch dimension stay whole."""
    tensors, template = flatten(thing, apart=True)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        own = batch_dim_of(tensor, size, dim)
        return tensor if own is None else tensor.index_select(own, torch.tensor(rows, device=tensor.device))

    return rebuild(template, [take(tensor) for tensor in tensors])


def moved_to(thing: Any, device: torch.device) -> Any:  # noqa: ANN401 - a structure of tensors
    """Return a structure of tensors, moved to a device."""
    tensors, template = flatten(thing, apart=True)
    return rebuild(template, [tensor.to(device) for tensor in tensors])


# ---- probes: outputs that training may lead to


def probe_tolerance(dtype: torch.dtype) -> float:
    """Return the largest difference of losses due to rounding; leaving out a sample makes a much larger one."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)


def probes(
    loss: LossFunction, runs: Sequence[Run], targets: Sequence[tuple[object, ...]], *, sizes: Sequence[int], dim: int
) -> Iterator[list[Scored]]:
    """Yield the losses of a whole and its parts, with gradients, on outputs that approach the targets step by step.

    A loss may leave out samples depending on their own loss (a threshold, hard examples only). A fresh model gets all
    samples wrong, so nothing is left out, and the loss looks like a mean over samples. Probes take steps of gradient
    descent on the outputs, longer for some samples than for others. They show how the loss behaves later.

    The first run is the whole, the others are its parts, which have these sizes.
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
