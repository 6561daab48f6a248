"""Samples: a few samples of a batch and of its target, as they are and with labels changed, to try a loss on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.model.example import Call
from penstock.model.structure import flatten, rebuild
from penstock.pipeline.exactness.scoring import parts_of
from penstock.runtime.loss_weights import IGNORED
from penstock.runtime.micro_batches import batch_dim_of

__all__ = [
    "FEW",
    "artificial_labels",
    "as_batch",
    "choices_of_rows",
    "ignoring",
    "label_names",
    "moved_to",
    "rows_of",
    "special_values",
    "with_ignored",
]

FEW = 5  # samples that are tried: two and three, for batch norm refuses one alone
_TRIES = 3  # choices of samples of a target
_LABELS = ("label", "target")  # words in the names of inputs that hold labels
_WHOLE_NUMBERS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MOST_CLASSES = 4  # of a target from which labels are made up


def label_names(call: Call, *, is_split: bool = False) -> list[str]:
    """Return the inputs that may hold labels; where the user splits batches, no dimension of theirs is known."""
    return [
        name
        for name, tensor, dim in zip(call.names, call.tensors, call.batch_dims, strict=True)
        if (dim is not None or is_split)
        and tensor.dtype in _WHOLE_NUMBERS
        and any(word in name.lower() for word in _LABELS)
    ]


def with_ignored(call: Call, names: Sequence[str]) -> Iterator[tuple[Call, list[Call]]]:
    """Yield a call and its parts: with labels of its last sample ignored, for each input with labels; then as it is."""
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
    """Yield a target as it is; then, if it is of labels, with none ignored, and with some: of a sample, and of rows."""
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
    if labels.dim() > 1 and labels.shape[0] > 1 and labels.shape[-1] > 1:  # do the first of each row count?
        changed = labels.clone()
        changed[: labels.shape[0] // 2, ..., 1:] = IGNORED
        yield [changed]


def artificial_labels(target: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield labels of the same classes as a target, otherwise dealt out: all of one class, and by chance."""
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
    """Yield a target of numbers with some changed into what a loss may leave out, and a word for these.

    Args:
        target: of a few samples.
        first: so many samples are in the first part.
        count: so many samples there are.
    """
    tensors, template = flatten(list(target), apart=True)
    for place, tensor in enumerate(tensors):
        if not tensor.is_floating_point() or not tensor.dim() or tensor.shape[0] != count:
            continue
        for words, value in (("NaN", float("nan")), ("zeros", 0.0)):
            changed = tensor.clone().contiguous()
            changed[first - 1] = value  # one sample of the first part, whole
            changed.view(count, -1)[first, -1] = value  # and the last number of one in the second
            yield words, rebuild(template, [*tensors[:place], changed, *tensors[place + 1 :]])


def as_batch(call: Call) -> Any:  # noqa: ANN401 - a tensor, a tuple or a dict, as the user gives batches
    """Return a call as the batch that a weight function is called with."""
    args, kwargs = call.arguments()
    return kwargs if kwargs else args[0] if len(args) == 1 else args


def choices_of_rows(size: int, count: int) -> Iterator[list[int]]:
    """Yield a few choices of samples: in one of them two weights may happen to agree."""
    yield [number * size // count for number in range(count)]
    for seed in range(_TRIES - 1):
        chance = random.Random(seed)  # noqa: S311 - nothing secret
        # of a small batch some come twice: the loss cannot know
        yield chance.sample(range(size), count) if size >= count else chance.choices(range(size), k=count)


def rows_of(thing: Any, size: int, rows: Sequence[int], dim: int) -> Any:  # noqa: ANN401 - whatever holds tensors
    """Return some samples of a target; what has no batch stays whole."""
    tensors, template = flatten(thing, apart=True)

    def take(tensor: torch.Tensor) -> torch.Tensor:
        own = batch_dim_of(tensor, size, dim)
        return tensor if own is None else tensor.index_select(own, torch.tensor(rows, device=tensor.device))

    return rebuild(template, [take(tensor) for tensor in tensors])


def moved_to(thing: Any, device: torch.device) -> Any:  # noqa: ANN401 - whatever holds tensors
    """Return whatever holds tensors with these on a device."""
    tensors, template = flatten(thing, apart=True)
    return rebuild(template, [tensor.to(device) for tensor in tensors])
