"""Stages: what a table of stages says, as pure data: what each holds and takes, and what crosses the cut after it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Crossing", "LaneRow", "StageRow", "Tie"]


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut.

    Attributes:
        name: of the value.
        shape: as a function of the batch, as `float32[batch, 128, 768]`.
        num_bytes: for a micro-batch.
        source: the stage that makes it.
        targets: the stages that use it.
        is_output: the model returns it.
        has_grad: its gradient comes back.
        is_dynamic: its shape depends on data; the one given was seen.
    """

    name: str
    shape: str
    num_bytes: int
    source: int
    targets: tuple[int, ...]
    is_output: bool = False
    has_grad: bool = False
    is_dynamic: bool = False

    def skips_at(self, cut: int) -> bool:
        """Does it cross the cut after a stage on its way past the next one?"""
        return self.source < cut or cut + 1 not in self.targets


@dataclass(frozen=True)
class StageRow:
    """A stage: which modules, what it takes for a micro-batch, what it holds, and what crosses the cut after it.

    Attributes:
        index: of the stage.
        lanes: where it lives; two where micro-batches go both ways.
        first_node: its first node.
        num_nodes: how many follow each other.
        modules: the paths of the modules it covers.
        modules_text: the same in few words.
        num_parameters: how many numbers its parameters hold.
        share: of the time of all stages.
        forward_seconds: for a micro-batch.
        input_grad_seconds: for a micro-batch.
        weight_grad_seconds: for a micro-batch.
        weight_bytes: of parameters and buffers.
        grad_bytes: of their gradients.
        optimizer_bytes: of the optimizer's state.
        saved_bytes: what it holds for the backward at its fullest, of all micro-batches in flight.
        crossing: what crosses the cut after it; nothing after the last.
    """

    index: int
    lanes: tuple[int, ...]
    first_node: int
    num_nodes: int
    modules: tuple[str, ...]
    modules_text: str
    num_parameters: int
    share: float
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    weight_bytes: float
    grad_bytes: float
    optimizer_bytes: float
    saved_bytes: float
    crossing: tuple[Crossing, ...] = ()

    @property
    def backward_seconds(self) -> float:
        """Both gradients."""
        return self.input_grad_seconds + self.weight_grad_seconds

    @property
    def memory_bytes(self) -> float:
        """All that it holds at its fullest."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes + self.saved_bytes

    @property
    def crossing_bytes(self) -> int:
        """What crosses the cut after it, for a micro-batch."""
        return sum(value.num_bytes for value in self.crossing)


@dataclass(frozen=True)
class LaneRow:
    """A lane: its stages, what it computes for a micro-batch, what it holds at its fullest, and how long it is idle."""

    index: int
    stages: tuple[int, ...]
    seconds: float
    num_bytes: float
    limit_bytes: float | None
    bubble: float


@dataclass(frozen=True)
class Tie:
    """A parameter of several names, or that several stages use: each of their lanes holds it."""

    name: str
    aliases: tuple[str, ...]
    stages: tuple[int, ...]
    num_bytes: int
