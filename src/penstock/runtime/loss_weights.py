"""Loss weights: the count that a loss averages over; known for torch's own losses, found by trial for others."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from penstock.model.structure import flatten

IGNORED = -100  # the label that torch's cross entropy and the models of transformers ignore
_MOST_PLACES = 4  # the tensors of a target that are tried
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_AVERAGING = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss", "NLLLoss2d")


@dataclass(frozen=True, eq=False)
class CountRule:
    """A rule that counts the values over which a loss averages, in one tensor of its target or of the batch."""

    name: str = ""  # the input of the model to count in; "" for the target
    place: int = 0  # the index of the tensor in the target
    # count labels that are not ignored ("kept"), or numbers that are "nonzero" or "finite" (not NaN); or add up the
    # numbers ("sum")
    how: Literal["kept", "nonzero", "finite", "sum"] = "kept"
    ignored: int = IGNORED  # the label that is ignored
    is_shifted: bool = False  # whether the first label of each row is ignored, as in causal language models
    class_weight: torch.Tensor | None = None  # the weight of each class

    def count(self, target: Any) -> Any:  # noqa: ANN401 - any target; a number, or a tensor of one
        """Return the count that the loss averages over.

        >>> CountRule().count(torch.tensor([[1, 2, -100]])).item()
        2
        >>> CountRule(is_shifted=True).count(torch.tensor([[1, 2, -100]])).item()
        1
        >>> CountRule(place=1, how="sum").count((torch.zeros(3), torch.tensor([1.0, 0.0, 0.5]))).item()
        1.5
        """
        tensors = [target] if isinstance(target, torch.Tensor) else flatten(target, apart=True)[0]
        if self.place >= len(tensors):
            return 1
        labels = tensors[self.place]
        if self.how != "kept":
            if self.how == "finite":
                return (~labels.isnan()).sum()
            return labels.double().sum() if self.how == "sum" else (labels != 0).sum()
        if labels.is_floating_point():  # probabilities: the mean is over the samples
            return labels.numel()
        if self.is_shifted:
            labels = labels[..., 1:]
        kept = labels != self.ignored
        if self.class_weight is None:
            return kept.sum()
        weights = self.class_weight.detach().to(labels.device, torch.float64)
        is_class = (labels >= 0) & (labels < len(weights))  # a kept label that is no class makes the count NaN
        counted = weights[labels.where(kept & is_class, 0)] * kept
        return counted.where(is_class | ~kept, float("nan")).sum()

    @property
    def words(self) -> str:
        """The rule in words."""
        where = f"the input {self.name}" if self.name else "the target" + (f" {self.place}" if self.place else "")
        if self.how != "kept":
            return {
                "sum": f"the sum of {where}",
                "nonzero": f"the nonzero numbers in {where}",
                "finite": f"the numbers in {where} that are not NaN",
            }[self.how]
        shifted = ", without the first of each row" if self.is_shifted else ""
        return f"the labels of {where} that are not {self.ignored}{shifted}"


FoundWeight = CountRule | Literal["sum"] | None


def weight_of_torch_loss(loss: object) -> tuple[bool, FoundWeight]:
    """Return whether a loss is one of torch's own, and the count that it averages over; None means samples.

    >>> weight_of_torch_loss(nn.MSELoss()), weight_of_torch_loss(nn.L1Loss(reduction="sum"))
    ((True, None), (True, 'sum'))
    >>> weight_of_torch_loss(lambda output, target: output.sum())
    (False, None)
    """
    settings: dict[str, Any] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        settings, loss = loss.keywords, loss.func
    is_function = getattr(loss, "__module__", "") == "torch.nn.functional"
    is_module = isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss"
    if not (is_function or is_module) or {"size_average", "reduce"} & settings.keys():
        return False, None
    if is_module and ("forward" in vars(loss) or any(getattr(loss, name, None) for name in _HOOKS)):
        return False, None  # it also runs the user's own code
    if is_module:
        settings = {key: getattr(loss, key, None) for key in ("reduction", "weight", "ignore_index")}
    name = getattr(loss, "__name__", type(loss).__name__)
    if settings.get("reduction") == "sum":
        return True, "sum"
    if name not in _AVERAGING:
        return True, None
    ignored = settings.get("ignore_index")
    weight = settings.get("weight")
    return True, CountRule(ignored=IGNORED if ignored is None else int(ignored), class_weight=weight)


def settings_of(loss: object) -> tuple[object, ...]:
    """Return the settings of one of torch's own loss modules, with ids in place of tensors."""
    if not isinstance(loss, nn.Module):
        return ()
    return tuple(
        id(value) if isinstance(value, torch.Tensor) else value
        for value in (getattr(loss, key, None) for key in ("reduction", "weight", "ignore_index", "pos_weight"))
    )


def candidates(
    names: Sequence[str], target: Sequence[torch.Tensor], left_out: Sequence[tuple[int, torch.Tensor | None]]
) -> Iterator[FoundWeight]:
    """Yield the counts that a loss may average over, the most common first.

    Args:
        names: the inputs of the model that may hold labels.
        target: the tensors of the target.
        left_out: for each mean over classes that ran, the ignored label and the class weights.
    """
    yield None
    weights = {id(weight): weight for _, weight in left_out if weight is not None}
    seen = [(ignored, weight) for weight in (*weights.values(), None) for ignored, _ in (*left_out, (IGNORED, None))]
    distinct = list({(ignored, id(weight)): (ignored, weight) for ignored, weight in seen}.values())
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    places = [(name, 0) for name in names]
    places += [("", place) for place, tensor in enumerate(target[:_MOST_PLACES]) if tensor.dtype in whole]
    for (name, place), (ignored, weight) in itertools.product(places, distinct):
        yield CountRule(name, place, ignored=ignored, class_weight=weight)
        yield CountRule(name, place, ignored=ignored, is_shifted=True, class_weight=weight)
    yield "sum"
    for place, tensor in enumerate(target[:_MOST_PLACES]):
        yield CountRule("", place, "nonzero")
        yield CountRule("", place, "sum")
        if tensor.is_floating_point():
            yield CountRule("", place, "finite")


def shares_with(weight: FoundWeight, sizes: Sequence[int], labels: Sequence[Any]) -> list[float] | None:
    """Return the share of each part in the loss, for parts with these numbers of samples; None if no count is valid."""
    if weight == "sum":
        return [1.0] * len(sizes)
    counts = [float(size) for size in sizes]
    if isinstance(weight, CountRule):
        counts = [float(weight.count(label)) for label in labels]
    total = sum(counts)
    return [count / total for count in counts] if 0 < total < math.inf and min(counts) >= 0 else None


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may cause between a whole batch's results and those of its parts."""
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(dtype, 5e-2)


def loss_tolerance(dtype: torch.dtype) -> float:
    """Return the same for losses and their gradients, which take only a few operations."""
    return {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)


def gradient_tolerance(dtype: torch.dtype) -> float:
    """Return the error that rounding may cause in the gradient of one parameter, relative to its own norm."""
    return {torch.float64: 1e-4, torch.float32: 1e-2}.get(dtype, 2e-1)


def total_gradient_tolerance(dtype: torch.dtype) -> float:
    """Return the same, relative to the norm of all gradients."""
    return {torch.float64: 1e-8, torch.float32: 2e-6}.get(dtype, 2e-2)
