"""Exported visits: run an exported graph node by node, on any device and for any batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from penstock.model.capture.export.symbolic_sizes import affine
from penstock.model.capture.export.traced_graph import ExportGraph
from penstock.model.visit import RunNode, Visitor


def visit_export(
    exported: ExportGraph,
    visitor: Visitor,
    *,
    inputs: Sequence[torch.Tensor],
    held: Mapping[str, torch.Tensor],
    batch_size: int,
    device: torch.device,
) -> None:
    """Run all nodes in order on a device.

    Args:
        exported: the graph.
        visitor: the visitor to which each node is passed.
        inputs: the input tensors of the model.
        held: the parameters, buffers and constants, by name.
        batch_size: the number of samples in the inputs.
        device: the device on which the model's code creates new tensors.
    """
    graph = exported.graph
    values: dict[int, torch.Tensor] = dict(zip(graph.inputs, inputs, strict=True))
    last = graph.last_use_of
    for index, node in enumerate(graph.nodes):
        run = _runner(exported, index, batch_size, device)
        made = visitor(index, run, [values[v] for v in node.inputs], [held[name] for name in node.parameters])
        values.update(zip(node.outputs, made, strict=False))
        for value in node.outputs[len(made) :]:  # versions after an in-place change: the shape stays the same
            values[value] = values[exported.value_of(exported.fx_values[value], before=index)]
        for value in (*node.inputs, *node.outputs):
            if last[value] <= index:
                values.pop(value, None)


def _runner(exported: ExportGraph, index: int, batch_size: int, device: torch.device) -> RunNode:
    """Return the function that computes one node from its inputs and parameters."""
    node = exported.graph.nodes[index]
    group = exported.fx_of[index]
    fx_of_value = [exported.fx_values[value] for value in node.inputs]
    held_nodes = [[n for n, own in exported.name_of.items() if own == name] for name in node.parameters]

    def run(inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        known: dict[fx.Node, Any] = dict(zip(fx_of_value, inputs, strict=True))
        for nodes, tensor in zip(held_nodes, parameters, strict=True):
            known.update(dict.fromkeys(nodes, tensor))
        for part in group:
            known[part] = _compute(part, known, exported, batch_size, device)
        made = [exported.fx_values[value] for value in node.outputs]
        return [known[own] for own in made if own in group]

    return run


def _compute(
    node: fx.Node, known: dict[fx.Node, Any], exported: ExportGraph, batch_size: int, device: torch.device
) -> Any:  # noqa: ANN401 - tensors, numbers or nested graphs
    """Compute an fx node, and the sizes and other numbers that it needs."""
    if node in known:
        return known[node]
    if node.op == "get_attr":
        return getattr(exported.root, str(node.target))
    value = node.meta.get("val")
    size = affine(value, exported.batch_symbols)
    if size is not None and isinstance(value, torch.SymInt):
        return size[0] + size[1] * batch_size

    def look_up(argument: fx.Node) -> Any:  # noqa: ANN401
        return _compute(argument, known, exported, batch_size, device)

    def moved(argument: Any) -> Any:  # noqa: ANN401
        return device if isinstance(argument, torch.device) else argument

    args = fx.node.map_aggregate(fx.node.map_arg(node.args, look_up), moved)
    kwargs = fx.node.map_aggregate(fx.node.map_arg(node.kwargs, look_up), moved)
    return node.target(*args, **kwargs)  # type: ignore[operator]
