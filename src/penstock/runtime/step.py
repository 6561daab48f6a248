"""Step: what one call of a pipeline brings to all lanes: the batch in pieces, the loss, and how to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.runtime.action_watch import Watch

if TYPE_CHECKING:
    from penstock.runtime.batch_loss import BatchLoss

__all__ = ["Batch", "Mode", "Step"]

# Of the last stage: from the model's results for a micro-batch and its target to its loss (None where there is none),
# and what the loss function returned beside it.
Finish = Callable[[Sequence[Any], int, tuple[Any, ...]], tuple[torch.Tensor | None, dict[str, torch.Tensor]]]


class Tapes(Protocol):
    """What a lane does in a step in place of its program's own actions.

    Attributes:
        is_replay: nothing of it is computed by torch's own operations.
    """

    is_replay: bool

    def open(self, step: Step) -> tuple[Step, list[tuple[Callable[..., None], Any]]]:
        """Begin a step: return the one to run, and what to do for each instruction."""
        ...

    def close(self) -> None:
        """End a step."""
        ...


@dataclass(frozen=True)
class Mode:
    """How stages run: in training or evaluation, with gradients or without, under which autocast."""

    is_training: bool
    has_backward: bool
    autocast: torch.dtype | None = None

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast to run a stage's forward under."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)


@dataclass(frozen=True)
class Batch:
    """A batch cut into micro-batches.

    Attributes:
        inputs: for each micro-batch the tensors that the model is called with, by name.
        sizes: the samples of each.
    """

    inputs: Sequence[Mapping[str, torch.Tensor]]
    sizes: Sequence[int]

    @property
    def num_mbs(self) -> int:
        """How many micro-batches the batch makes; fewer than the schedule has where samples are few."""
        return len(self.sizes)


@dataclass
class Step:
    """Everything that lanes share in one step; `finish` and `scales` are for the lanes that end the model.

    Attributes:
        number: counts steps.
        batch: the micro-batches.
        mode: how to run.
        finish: from results to a loss.
        targets: for each micro-batch nothing, or one thing.
        scales: for each micro-batch what its loss counts in the gradient.
        over_batch: takes the results of all micro-batches, where one loss is computed of all; `finish` is not called.
        factor: on top of that, of all losses alike: a gradient scaler's, which only the device knows.
        seeds: scales times factor as a tensor, where it may change after what reads it was captured.
        seed: random numbers follow from it, the micro-batch and what draws them.
        measures_memory: forwards count what they save, whatever their keep policy.
        tapes: for each lane what to do instead of its program's own actions: replays of them, or their capture.
        watch: is told of every action.
        losses: for each micro-batch its loss, once it is known; the loss over the batch, under the last one to come.
        metrics: for each micro-batch what the loss returned beside it.
        given: the batch as the user gave it, and its target, where processes are to compare them.
    """

    number: int
    batch: Batch
    mode: Mode
    finish: Finish
    targets: Sequence[tuple[Any, ...]]
    scales: Sequence[float] = ()
    factor: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    seed: int = 0
    measures_memory: bool = False
    tapes: Mapping[int, Tapes] | None = None
    watch: Watch | None = None
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    over_batch: BatchLoss | None = None
    given: tuple[Any, ...] = ()
