"""Step: the data that all lanes share in one call of a pipeline: the micro-batches, the loss, the mode, the watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from penstock.runtime.batch_loss import BatchLoss
    from penstock.runtime.graphs.lane_graphs import Capture, Tape
    from penstock.runtime.lane_program import Instruction

# Called in the last stage with the model's results for a micro-batch, its number and its target. Returns the loss, or
# None if there is none, and the metrics that the loss function returned with it.
Finish = Callable[[Sequence[Any], int, tuple[Any, ...]], tuple[torch.Tensor | None, dict[str, torch.Tensor]]]


class Watch(Protocol):
    """An object that sees every action, on the thread of its lane. `pipe.watch = watch` starts it.

    Steps then run one action after another, never as CUDA graphs. Either all processes have a watch, or none has.
    """

    def before(self, lane: int, step_number: int, instruction: Instruction) -> bool:
        """Return whether to run the action; if this method raises, the action fails."""
        ...

    def after(self, lane: int, step_number: int, instruction: Instruction, values: Sequence[torch.Tensor]) -> None:
        """Receive the values that an action made: activations, the loss and gradients, but not its inputs."""
        ...

    def failed(self, lane: int, step_number: int, instruction: Instruction) -> None:
        """Receive an action that failed after `before`; `after` is not called for it."""
        ...


@dataclass(frozen=True)
class Mode:
    """How stages run: in training or evaluation, with or without gradients, and under which autocast."""

    is_training: bool
    has_backward: bool
    autocast: torch.dtype | None = None

    def cast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context for a stage's forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.autocast, cache_enabled=False)


@dataclass(frozen=True)
class Batch:
    """A batch cut into micro-batches."""

    inputs: Sequence[Mapping[str, torch.Tensor]]  # for each micro-batch, the input tensors of the model, by name
    sizes: Sequence[int]  # the number of samples of each micro-batch

    @property
    def num_mbs(self) -> int:
        """Number of micro-batches; smaller than in the schedule if there are few samples."""
        return len(self.sizes)


@dataclass
class Step:
    """Everything that lanes share in one step; only lanes with the last stage use `finish` and `scales`."""

    number: int  # the number of the step
    batch: Batch  # the micro-batches
    mode: Mode  # how the stages run
    finish: Finish  # computes the loss from the results of the model
    targets: Sequence[tuple[Any, ...]]  # for each micro-batch, a tuple with its target; empty if there is none
    scales: Sequence[float] = ()  # for each micro-batch, the factor of its loss in the gradient
    scale: float = 1.0  # the user's factor of the loss in the gradients; `scales` contain it
    factor: torch.Tensor | None = None  # GradScaler's scale, applied to every loss; it stays on the device
    # in a capture, a tensor for scales times factor; its values change between replays
    seeds: torch.Tensor | None = None
    seed: int = 0  # the seed; random numbers follow from it, the micro-batch and the draw name
    measures_memory: bool = False  # whether forwards count the bytes that they save, under every keep policy
    # for each lane, the replacement for the actions of its program: their replays, or their capture
    tapes: Mapping[int, Tape | Capture] | None = None
    watch: Watch | None = None  # sees every action, before and after it runs
    # the computed loss of each micro-batch; a loss on the batch is stored under the micro-batch added last
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    # for each micro-batch, the metrics that the loss function returned
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    # one loss on the results of all micro-batches, used in place of `finish`; None: one loss for each
    over_batch: BatchLoss | None = None
    given: tuple[Any, ...] = ()  # the batch and its target as the user gave them, if processes have to compare them


def new_tensors(known: Iterable[torch.Tensor], found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of `found` that share no memory with `known`; one tensor for each piece of memory."""
    seen = {_memory(tensor) for tensor in known}
    made: dict[int, torch.Tensor] = {}
    for value in found:
        if isinstance(value, torch.Tensor) and _memory(value) not in seen:
            made.setdefault(_memory(value), value)
    return list(made.values())


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:  # a sparse tensor has several pieces of memory
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)
