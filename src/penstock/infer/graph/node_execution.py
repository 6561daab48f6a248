"""Node execution: run the nodes of a program one by one, with real or with fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.devices.sanitizer import unsanitized


def compute(node: fx.Node, known: Mapping[fx.Node, Any], root: nn.Module) -> Any:  # noqa: ANN401 - tensors, numbers
    """Compute one node from known values."""

    def look_up(argument: fx.Node) -> Any:  # noqa: ANN401
        return getattr(root, str(argument.target)) if argument.op == "get_attr" else known[argument]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), look_up)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@contextmanager
def fake_tensors(given: Mapping[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """Yield the given values with fake tensors; results of operations on them are fake too."""
    with unsanitized(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        yield {
            node: fakes.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
            for node, value in given.items()
        }


def fake_values(calls: Sequence[fx.Node], root: nn.Module, given: Mapping[fx.Node, Any]) -> dict[fx.Node, Any] | None:
    """Return the fake value of each node; None if that is not possible."""
    try:
        with fake_tensors(given) as known:
            for node in calls:
                known[node] = compute(node, known, root)
    except Exception:  # an operation that needs real data, or a batch size that the model does not support
        return None
    return known
