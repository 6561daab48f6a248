"""Capture: turn any model and an example into a Graph that can be cut into stages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from penstock.model.example import Call, read_example
from penstock.model.graph import Graph
from penstock.model.stages import Chain
from penstock.model.visit import Visitor

__all__ = ["Captured", "capture"]


class Captured(Protocol):
    """A captured model, by whatever path."""

    graph: Graph
    path: str
    reason: str

    def split(self, cuts: Sequence[int]) -> Chain:
        """Return the stages between the cuts."""
        ...

    def visit(self, visitor: Visitor, *, device: torch.device | None = None, batch_size: int | None = None) -> None:
        """Run the model once, node by node, on a device (also "meta") and for a batch size; show each to a visitor."""
        ...


def capture(model: nn.Module, example: object, *, training: bool | None = None) -> Captured:
    from penstock.model.exported import Exported

    call = read_example(example)
    return Exported(model, call, training=model.training if training is None else training)
