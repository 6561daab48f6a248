"""Visit by replay: run the model's own forward and show each module call to a visitor as it happens."""

from __future__ import annotations

from torch import nn

import torch
from penstock.model.example import Call
from penstock.model.graph import Graph
from penstock.model.visit import Visitor

__all__ = ["visit_replay"]


def visit_replay(model: nn.Module, graph: Graph, call: Call, visitor: Visitor, *, device: torch.device) -> None:
    raise NotImplementedError
