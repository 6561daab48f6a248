"""Visit: run a captured model once, node by node, and let someone look at each node as it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

__all__ = ["RunNode", "Visitor"]

RunNode = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


class Visitor(Protocol):
    """Someone who is shown each node in its turn."""

    def __call__(
        self, index: int, run: RunNode, inputs: list[torch.Tensor], parameters: list[torch.Tensor], glue: str = ""
    ) -> list[torch.Tensor]:
        """Return the node's outputs, as `run(inputs, parameters)` computes them; the visit goes on with these.

        Args:
            index: of the node in the graph.
            run: computes the node's output values from its input values and its parameters and buffers; may be called
                as often as one likes, with other tensors too.
            inputs: the values that the node uses, in the order of `Node.inputs`.
            parameters: in the order of `Node.parameters`.
            glue: for a torch function between two module calls, which belongs to the node of the call before it: its
                name. `parameters` is then empty.
        """
        ...
