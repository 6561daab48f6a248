"""Stepper: one update of the weights, from the items of the data to the optimizer, and a validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import UsageError
from penstock.feeding.item_carrier import Split, is_pair

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.report.timeline import Timeline


class ItemReader:
    """Reads the items of a data source.

    Args:
        split: a function from an item to (batch, target).
        has_target: whether an item of two parts is (batch, target); otherwise every item is a batch.
    """

    def __init__(self, split: Split | None, *, has_target: bool) -> None:
        self._split, self._has_target = split, has_target or split is not None

    def call(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any item
        """Return the arguments of `pipe.step` for an item that is already split: a batch, or a batch and its target."""
        return tuple(item) if self._has_target and is_pair(item) else (item,)

    def split(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any item
        """Return the arguments of `pipe.evaluate` for an item that did not pass through a feed."""
        return self.call(item if self._split is None else self._split(item))


@dataclass(frozen=True)
class UpdateResult:
    """The results of an update's forwards and backwards, before the weights change."""

    loss: float  # the mean loss of its batches
    gradient_norm: float | None  # of all lanes, before clipping; None if the schedule updates weights within the step
    timeline: Timeline | None  # of its last batch, if it was recorded
    metrics: Mapping[str, float]  # the additional results of the loss, by name, as means over the batches

    @property
    def has_finite_loss(self) -> bool:
        """Whether the loss is finite."""
        return math.isfinite(self.loss)

    @property
    def is_finite(self) -> bool:
        """Whether the loss and the gradients are finite."""
        return self.has_finite_loss and (self.gradient_norm is None or math.isfinite(self.gradient_norm))


class Stepper:
    """Runs updates; `Trainer` describes the arguments."""

    def __init__(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any],
        scaler: torch.amp.GradScaler | None, *, clip: float | None, accumulate: int,
    ) -> None:  # fmt: skip
        has_own = bool(pipe.optimizers)
        name = pipe.schedule.name
        if has_own and optimizer is not None:
            raise UsageError(f"optimizer: {name} updates weights within the step, with pipe.optimizers; pass None")
        if has_own and (clip is not None or accumulate > 1 or scaler is not None):
            raise UsageError(f"clip, accumulate, scaler: {name} updates weights within the step; omit them")
        if not has_own and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer: expected a torch.optim.Optimizer; given: {type(optimizer).__name__}")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError("optimizer: LBFGS runs the model several times per update, which a pipeline cannot do")
        if scaler is not None and scaler is not pipe.internals.scaler:
            raise UsageError("scaler: pass the pipeline's own scaler, or omit it")
        self._pipe, self.optimizer, self.scaler = pipe, optimizer, pipe.internals.scaler
        self._plateaus = [one for one in schedulers if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau)]
        self._schedulers = [one for one in schedulers if one not in self._plateaus]
        self._clip, self.accumulate = clip, accumulate

    @property
    def has_plateau(self) -> bool:
        """Whether a scheduler follows the validation loss."""
        return bool(self._plateaus)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All optimizers of this process."""
        return list(self._pipe.optimizers.values()) if self.optimizer is None else [self.optimizer]

    def run(self, batches: Sequence[tuple[Any, ...]], *, is_recorded: bool) -> UpdateResult:
        """Run forward and backward for the batches of an update, each (batch,) or (batch, target); clip gradients."""
        pipe, last, made, timeline = self._pipe, len(batches) - 1, [], None
        scale = 1 / len(batches)
        for number, given in enumerate(batches):
            with pipe.no_sync() if number < last else nullcontext():
                if is_recorded and number == last:
                    with pipe.record() as recording:
                        made.append(pipe.step(*given, metrics=True, scale=scale))
                    timeline = recording.timeline
                else:
                    made.append(pipe.step(*given, metrics=True, scale=scale))
        losses, metrics = [loss for loss, _ in made], mean_metrics([(1, found) for _, found in made])
        if self.optimizer is None:
            return UpdateResult(_mean(losses), None, timeline, metrics)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = pipe.clip_grad_norm_(math.inf if self._clip is None else self._clip)
        return UpdateResult(_mean(losses), float(norm), timeline, metrics)

    def update(self, before: Callable[[], None]) -> None:
        """Call `before`, then update the weights and the learning rate."""
        before()
        if self.optimizer is not None:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.forget()
        for scheduler in self._schedulers:
            scheduler.step()

    def follow(self, loss: float) -> None:
        """Pass a validation loss to the schedulers that follow it."""
        for plateau in self._plateaus:
            plateau.step(loss)

    def drop(self) -> None:
        """Skip the update: drop the gradients, and the scaler's record of them."""
        if self.scaler is not None:
            self.scaler.update()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        if self.optimizer is not None:
            self._pipe.zero_grad()
            self.optimizer.zero_grad()  # includes the loss function's own parameters

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of all groups."""
        return tuple(float(group["lr"]) for one in self.optimizers for group in one.param_groups if "lr" in group)


def _mean(losses: Sequence[torch.Tensor]) -> float:
    return math.fsum(float(loss) for loss in losses) / len(losses)


def mean_metrics(found: Sequence[tuple[int, Mapping[str, torch.Tensor]]]) -> dict[str, float]:
    """Return the weighted mean of each metric over the batches that have it.

    >>> mean_metrics([(1, {"a": torch.tensor(1.0)}), (3, {"a": torch.tensor(2.0), "b": torch.tensor(4.0)})])
    {'a': 1.75, 'b': 4.0}
    """
    means = {}
    for name in dict.fromkeys(name for _, metrics in found for name in metrics):
        rows = [(weight, float(metrics[name])) for weight, metrics in found if name in metrics]
        means[name] = math.fsum(weight * value for weight, value in rows) / sum(weight for weight, _ in rows)
    return means


def validate(
    pipe: Pipeline, data: Iterable[Any], items: ItemReader, why_to_end: Callable[[], str | None]
) -> tuple[float, dict[str, float], int] | str:
    """Return the mean loss and metrics per sample and the number of samples; or the reason for an early end.

    `why_to_end` is called before each batch: a long validation must not use up the time that a job scheduler leaves for
    the checkpoint.
    """
    total, count, found = 0.0, 0, []
    for item in data:
        if reason := why_to_end():
            return reason
        call = items.split(item)
        size = max(1, pipe.num_samples(call[0]))
        loss, metrics = pipe.evaluate(*call, metrics=True)
        total, count = total + size * float(loss), count + size
        found.append((size, metrics))
    if not count:
        raise UsageError("validation: has no batches; an iterable that can be used only once is empty the second time")
    return total / count, mean_metrics(found), count
