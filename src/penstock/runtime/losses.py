"""Losses: find the loss in what a model returns, and say what each micro-batch's loss counts in that of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from penstock.errors import UsageError
from penstock.model.structure import flatten

__all__ = ["Weight", "find_loss", "shares_of", "warn_of_uneven_tokens"]

LossFunction = Callable[..., Any]
# what the loss averages over, in one micro-batch: called with the batch and the target; or "sum" for one that adds up
Weight = Callable[[Any, Any], Any] | Literal["sum"] | None

_IGNORED = -100  # what torch's cross entropy and the labels of transformers leave out


def find_loss(output: object, loss: LossFunction | None, target: Sequence[Any]) -> torch.Tensor:
    """Return the loss of one micro-batch.

    Args:
        output: what the model returned.
        loss: `loss(output, target)`; None where the output is the loss, or holds it.
        target: nothing, or one thing.
    """
    found: Any = output if loss is None else loss(output, *target)
    if not isinstance(found, torch.Tensor):
        for inner in (getattr(found, "loss", None), _first(found)):
            if isinstance(inner, torch.Tensor):
                found = inner
                break
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        said = "the model returns" if loss is None else "loss(output, target) returns"
        raise UsageError(f"no loss: {said} {what}; a loss is one number: give loss=, or let the model return .loss")
    return found.reshape(()) if found.dim() else found


def _first(found: object) -> object:
    if isinstance(found, Mapping):
        return found.get("loss")
    return found[0] if isinstance(found, (tuple, list)) and found else None


def shares_of(weight: Weight, batches: Sequence[Any], targets: Sequence[Any], sizes: Sequence[int]) -> list[float]:
    """Return what each micro-batch's loss counts, so that the sum is the loss of the whole batch.

    Args:
        weight: what the loss averages over; None for samples.
        batches: each micro-batch, as the user gave the batch.
        targets: each target, or None.
        sizes: the samples of each.
    """
    if weight == "sum":
        return [1.0] * len(sizes)
    counts = [float(size) for size in sizes]
    if weight is not None:
        counts = [_number(weight(batch, target)) for batch, target in zip(batches, targets, strict=True)]
        wrong = [count for count in counts if not 0 <= count < float("inf")]
        if wrong:
            raise UsageError(f"weight: must return how much the loss averages over, zero or more; returned: {wrong[0]}")
    total = sum(counts)
    return [count / total for count in counts] if total else [float("nan")] * len(counts)


def _number(count: Any) -> float:  # noqa: ANN401 - a number, or a tensor of one
    try:
        return float(count)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"weight: must return a number; returned: {count!r:.60}") from None


def warn_of_uneven_tokens(loss: LossFunction | None, batches: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Warn where a mean over tokens would be wrong if micro-batches count by samples; return whether it was."""
    if getattr(loss, "reduction", "mean") != "mean":
        return False
    ignored = getattr(loss, "ignore_index", _IGNORED)
    has_target = any(target is not None for target in targets)
    things = targets if has_target else batches
    counts = [[int((tensor != ignored).sum()) for tensor in _labels(thing)] for thing in things]
    for place, of_each in enumerate(zip(*counts, strict=False)):
        sizes = [tensors[place].numel() for tensors in map(list, map(_labels, things))]
        if len({count / size for count, size in zip(of_each, sizes, strict=True) if size}) > 1:
            warnings.warn(
                f"micro-batches have different shares of targets that are not {ignored}: {list(of_each)}. A loss that "
                "averages over those is exact only with weight=, as in weight=lambda batch, target: "
                f"(target != {ignored}).sum(); weight='sum' says that the loss adds up",
                stacklevel=4,
            )
            return True
    return False


def _labels(thing: object) -> Iterator[torch.Tensor]:
    """Yield the whole numbers in a thing that could be classes with some left out."""
    tensors, _ = flatten(thing, apart=True)
    yield from (t for t in tensors if t.dtype in (torch.int64, torch.int32) and t.dim() and t.numel())
