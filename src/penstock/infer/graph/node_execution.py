"""Computing: run the nodes of a program one by one, also on tensors without memory, which have but shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.devices.sanitizer import unsanitized

__all__ = ["compute", "shown_for", "without_memory"]


def compute(node: fx.Node, known: Mapping[fx.Node, Any], root: nn.Module) -> Any:  # noqa: ANN401 - tensors, numbers
    """Compute one node from what is known."""

    def look_up(argument: fx.Node) -> Any:  # noqa: ANN401
        return getattr(root, str(argument.target)) if argument.op == "get_attr" else known[argument]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), look_up)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@contextmanager
def without_memory(given: Mapping[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """Yield what is given as tensors without memory; what is computed with them meanwhile has none either."""
    with unsanitized(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        yield {
            node: fakes.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
            for node, value in given.items()
        }


def shown_for(calls: Sequence[fx.Node], root: nn.Module, given: Mapping[fx.Node, Any]) -> dict[fx.Node, Any] | None:
    """Return what each node makes of what is given, without memory; None where that cannot be done."""
    try:
        with without_memory(given) as known:
            for node in calls:
                known[node] = compute(node, known, root)
    except Exception:  # an operation that needs memory, or a number of samples that the model does not take
        return None
    return known
