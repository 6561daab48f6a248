"""Visits: one run of a captured model, node by node, which passes each node to a visitor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

RunNode = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


class Visitor(Protocol):
    """The object that receives each node in turn."""

    def __call__(
        self, index: int, run: RunNode, inputs: list[torch.Tensor], parameters: list[torch.Tensor], glue: str = ""
    ) -> list[torch.Tensor]:
        """Return the node's outputs, as `run(inputs, parameters)` computes them; the visit continues with these.

        Args:
            index: the index of the node in the graph.
            run: computes the node's output values from its input values and its parameters and buffers. It may be
                called several times, also with other tensors.
            inputs: the values that the node uses, in the order of `Node.inputs`.
            parameters: the parameters and buffers, in the order of `Node.parameters`.
            glue: the name of a torch function between two module calls. The function belongs to the node of the
                previous call, and `parameters` is empty.
        """
        ...
