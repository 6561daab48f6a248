"""Watch: an object that sees every action of a step before and after it runs, and the values that it made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from penstock.runtime.lane_program import Instruction


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
