"""Loss weights: what a loss averages over, read off torch's own losses or tried out on the user's."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

__all__ = [
    "IGNORED",
    "Counted",
    "FoundWeight",
    "candidates",
    "deviation",
    "known_weight",
    "loss_tolerance",
    "tolerance",
]

IGNORED = -100  # the label that torch's cross entropy and the models of transformers leave out
_AVERAGING = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "NLLLoss2d")


@dataclass(frozen=True, eq=False)
class Counted:
    """A loss that averages over the labels that are not ignored, each by the weight of its class.

    Attributes:
        name: the input of the model that holds the labels; "" where they are the target.
        ignored: the label that is left out.
        is_shifted: the first label of each row is left out, as causal language models do.
        class_weight: the weight of each class.
    """

    name: str = ""
    ignored: int = IGNORED
    is_shifted: bool = False
    class_weight: torch.Tensor | None = None

    def count(self, labels: Any) -> Any:  # noqa: ANN401 - a tensor, or what is no label at all
        """Return over how much the loss of these labels averages.

        >>> Counted().count(torch.tensor([[1, 2, -100]])).item()
        2
        >>> Counted(is_shifted=True).count(torch.tensor([[1, 2, -100]])).item()
        1
        """
        if not isinstance(labels, torch.Tensor):
            return 1
        if labels.is_floating_point():  # probabilities: the mean is over the samples
            return labels.numel()
        if self.is_shifted:
            labels = labels[..., 1:]
        kept = labels != self.ignored
        if self.class_weight is None:
            return kept.sum()
        weights = self.class_weight.detach().to(labels.device, torch.float64)
        return (weights[labels.where(kept, 0)] * kept).sum()


FoundWeight = Counted | Literal["sum"] | None


def known_weight(loss: object) -> tuple[bool, FoundWeight]:
    """Return whether a loss is one of torch's own, and what it averages over: None stands for samples.

    >>> known_weight(nn.MSELoss()), known_weight(nn.L1Loss(reduction="sum")), known_weight(lambda a, b: a)
    ((True, None), (True, 'sum'), (False, None))
    """
    settings: dict[str, Any] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        settings, loss = loss.keywords, loss.func
    is_function = getattr(loss, "__module__", "") == "torch.nn.functional"
    is_module = isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss"
    if not (is_function or is_module) or {"size_average", "reduce"} & settings.keys():
        return False, None
    if is_module:
        settings = {key: getattr(loss, key, None) for key in ("reduction", "weight", "ignore_index")}
    name = getattr(loss, "__name__", type(loss).__name__)
    if settings.get("reduction") == "sum":
        return True, "sum"
    if name not in _AVERAGING:
        return True, None
    ignored = settings.get("ignore_index")
    weight = settings.get("weight")
    return True, Counted(ignored=IGNORED if ignored is None else int(ignored), class_weight=weight)


def candidates(loss: object, label_name: str = "") -> Iterator[FoundWeight]:
    """Yield what a loss may average over, the usual first."""
    ignored = getattr(loss, "ignore_index", None)
    ignored = ignored if isinstance(ignored, int) else IGNORED
    yield None
    yield Counted(label_name, ignored)
    yield Counted(label_name, ignored, is_shifted=True)
    yield "sum"


def deviation(
    weight: FoundWeight, whole: torch.Tensor, parts: Sequence[torch.Tensor], labels: Sequence[Any], sizes: Sequence[int]
) -> float:
    """Return how far the weighted losses of the parts are from the loss of the whole, relative to it."""
    counts = [float(size) for size in sizes]
    if isinstance(weight, Counted):
        counts = [float(weight.count(label)) for label in labels]
    total = sum(counts)
    if weight != "sum" and not total:
        return float("inf")
    shares = [1.0 if weight == "sum" else count / total for count in counts]
    joined = sum(share * float(part) for share, part in zip(shares, parts, strict=True) if share)
    scale = max(1e-30, *(abs(float(loss)) for loss in (whole, *parts)))
    return abs(float(whole) - joined) / scale


def tolerance(dtype: torch.dtype) -> float:
    """Return how far results of a whole batch and of its parts may be apart by rounding alone."""
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 5e-2)


def loss_tolerance(dtype: torch.dtype) -> float:
    """Return the same for losses, which are means and so more exact."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
