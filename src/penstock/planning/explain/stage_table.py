"""Stage table: the rows of the tables of stages, lanes and tied parameters, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut."""

    name: str
    shape: str  # its shape as a function of the batch, such as `float32[batch, 128, 768]`
    num_bytes: int  # its bytes for one micro-batch
    source: int  # the stage that makes it
    targets: tuple[int, ...]  # the stages that use it
    is_output: bool = False  # whether the model returns it
    has_grad: bool = False  # whether its gradient is sent back
    is_dynamic: bool = False  # whether its shape depends on data; then `shape` is that of the example

    def skips_at(self, cut: int) -> bool:
        """Whether it crosses the cut after a stage without being used by the next stage."""
        return self.source < cut or cut + 1 not in self.targets


@dataclass(frozen=True)
class StageRow:
    """A stage: its modules, its costs for one micro-batch, its memory, and the values that cross the cut after it."""

    index: int
    lanes: tuple[int, ...]  # the lanes of the stage; two in a bidirectional schedule
    first_node: int
    num_nodes: int
    modules: tuple[str, ...]  # paths of the modules that it covers
    modules_text: str  # the same as a short text
    num_parameters: int  # number of elements of its parameters
    share: float  # its share of the time of all stages
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    weight_bytes: float  # bytes of parameters and buffers
    grad_bytes: float  # bytes of gradients
    optimizer_bytes: float  # bytes of optimizer state
    saved_bytes: float  # peak bytes of values saved for the backward, for all micro-batches in flight
    crossing: tuple[Crossing, ...] = ()  # values that cross the cut after it; empty for the last stage

    @property
    def backward_seconds(self) -> float:
        """Time of both gradients."""
        return self.input_grad_seconds + self.weight_grad_seconds

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the stage."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes + self.saved_bytes

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross the cut after it, for one micro-batch."""
        return sum(value.num_bytes for value in self.crossing)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return asdict(self) | {
            name: getattr(self, name) for name in ("backward_seconds", "memory_bytes", "crossing_bytes")
        }


@dataclass(frozen=True)
class LaneRow:
    """A lane: its stages, its compute time for one micro-batch, its peak memory and limit, and its bubble."""

    index: int
    stages: tuple[int, ...]
    seconds: float
    num_bytes: float
    limit_bytes: float | None
    bubble: float


@dataclass(frozen=True)
class Tie:
    """A parameter with several names, or one that several stages use; each of these stages holds it."""

    name: str
    aliases: tuple[str, ...]
    stages: tuple[int, ...]
    num_bytes: int
