"""Capture: turn any model and an example into a Graph that can be cut into stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from penstock.errors import CaptureError, PenstockError
from penstock.model.example import read_example
from penstock.model.exported import Exported
from penstock.model.graph import Graph
from penstock.model.replayed import Replayed
from penstock.model.source import line_of
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


def capture(model: nn.Module, example: object, *, training: bool | None = None, path: str = "auto") -> Captured:
    """Capture a model: by torch.export where that keeps what the model means, else by replay.

    Args:
        model: any module, unchanged; in any mode, on any device, also on meta.
        example: how it is called: a tensor, a tuple of arguments or a dict of keyword arguments.
        training: capture it in training or in evaluation; by default in the mode that it is in. The other mode is
            captured when a stage is first put into it.
        path: "export" or "replay" to have one of the two; "auto" takes the first that works.

    Raises:
        CaptureError: when neither path can take it; says where each stopped, and what to do.
        UsageError: when the example cannot be right.
    """
    model, call = plain_module(model), read_example(example)
    mode = model.training if training is None else training
    refusal = hooks_in(model) if path == "auto" else ""
    if path == "export" or (path == "auto" and not refusal):
        try:
            return Exported(model, call, training=mode)
        except CaptureError as error:
            if path == "export":
                raise
            refusal = str(error)
    try:
        return Replayed(model, call, training=mode, reason=refusal or "asked for")
    except PenstockError as error:
        raise CaptureError(_both(refusal, str(error))) from error
    except Exception as error:
        raise CaptureError(_both(refusal, f"{type(error).__name__}: {error} {line_of(error)}")) from error


def _both(first: str, second: str) -> str:
    stopped = f"export: {first}; " if first else ""
    return (
        f"no path can take this model: {stopped}replay: {second}. Call the model on the example once without Penstock:"
        " if that works, cut it yourself: give a list of stage modules, or wrap what stops it in a module of its own"
    )


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module under torch.compile: what is cut is compiled again, stage by stage."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def hooks_in(model: nn.Module) -> str:
    """Say which module has hooks on its forward or backward: a trace would forget them."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in kinds):
            return f"hooks on {name or 'the model'}, which only the model's own forward calls"
    return ""
