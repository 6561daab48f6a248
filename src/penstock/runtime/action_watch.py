"""Watch: sees every action of a step, before and after it, with what it made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from penstock.runtime.lane_program import Instruction

__all__ = ["Watch", "new_tensors"]


class Watch(Protocol):
    """What is told of actions, on the thread of their lane, while a pipeline has it: `pipe.watch = it`.

    Steps then run one action after the other, never as CUDA graphs. Of several processes all have a watch, or none.
    """

    def before(self, lane: int, step_number: int, instruction: Instruction) -> bool:
        """Return whether the action is to be done; raise to let it fail."""
        ...

    def after(self, lane: int, step_number: int, instruction: Instruction, values: Sequence[torch.Tensor]) -> None:
        """See what an action made: activations, the loss, gradients; not what it was given."""
        ...

    def failed(self, lane: int, step_number: int, instruction: Instruction) -> None:
        """Hear that an action failed after `before`; there is no `after`."""
        ...


def new_tensors(known: Iterable[torch.Tensor], found: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among what was found that do not lie in the memory of others, each memory once."""
    seen = {_memory(tensor) for tensor in known}
    made: dict[int, torch.Tensor] = {}
    for value in found:
        if isinstance(value, torch.Tensor) and _memory(value) not in seen:
            made.setdefault(_memory(value), value)
    return list(made.values())


def _memory(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:  # what is sparse has no one memory
        return id(tensor)
    return tensor.untyped_storage().data_ptr() or id(tensor)
