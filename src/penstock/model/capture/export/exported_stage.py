"""Exported stages: one program per stage, with held tensors, received values and the batch size as arguments.

A visit runs the same operations node by node, on any device and for any batch size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from penstock.compile.options import Options, compiled
from penstock.model.capture.export.symbolic_sizes import affine
from penstock.model.capture.export.traced_graph import ExportGraph
from penstock.model.capture.export.traced_operations import draws
from penstock.model.example import Call
from penstock.model.source import SOURCE, line_of_trace
from penstock.model.stages import HeldTensors
from penstock.model.visit import RunNode, Visitor
from penstock.randomness.draw_names import enter, set_draw_names
from penstock.randomness.placed_draws import draw_at


@dataclass(eq=False)
class ExportProgram:
    """The operations of one stage."""

    module: fx.GraphModule  # the operations
    held_names: tuple[str, ...]  # the names of the parameters, buffers and constants that it uses
    inputs: tuple[str, ...]  # the names of the values that it needs
    outputs: tuple[str, ...]  # the names of the values that it makes
    reassigned: tuple[str, ...]  # the buffers to which the model assigns another tensor
    device: torch.device  # the device on which it makes new tensors
    is_fixed: ClassVar[bool] = True  # whether it runs the same operations for every micro-batch
    _compiled: Callable[..., tuple[Any, ...]] | None = None
    _places: tuple[str, ...] = ()  # the compiled nodes that draw

    def compile(self, options: Options) -> None:
        """Let Inductor compile the operations."""
        places: list[str] = []
        for node in self.module.graph.find_nodes(op="call_function", target=enter):
            drawing = node.next
            drawing.args, drawing.target = (len(places), drawing.target, *drawing.args), draw_at
            places.append(str(node.args[0]))
            self.module.graph.erase_node(node)
        self.module.recompile()
        self._places = tuple(places)
        self._compiled = compiled(self.module, options)

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:
        """Compute the outputs, and replace the buffers to which the model assigns another tensor."""
        tensors = [held.get(name) for name in self.held_names]
        device = next((tensor.device for tensor in (*tensors, *values)), self.device)
        if device != self.device:
            self._move(device)
        run = self.module.forward if self._compiled is None else self._compiled
        if self._places:
            set_draw_names(self._places)
        made: tuple[Any, ...] = run(*tensors, *values, batch_size)
        if self.reassigned:
            count = len(self.outputs)
            for name, tensor in zip(self.reassigned, made[count:], strict=True):
                held.set(name, tensor.detach())  # not copied into the old tensor, which the backward may need
            return made[:count]
        return made

    def _move(self, device: torch.device) -> None:
        """Change the device on which the program creates new tensors, such as positions."""
        old, self.device = self.device, device
        for module in self.module.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    node.args = fx.node.map_aggregate(node.args, lambda a: device if a == old else a)
                    node.kwargs = fx.node.map_aggregate(node.kwargs, lambda a: device if a == old else a)
                module.recompile()


class StageBuilder:
    """Makes the program of the stage that runs some nodes."""

    def __init__(self, exported: ExportGraph, nodes: range, *, is_last: bool) -> None:
        self.exported, self.nodes, self.is_last = exported, nodes, is_last
        self.source = exported.graph
        self.body = fx.Graph()
        self.copy_of: dict[fx.Node, fx.Node] = {}
        self.held: dict[str, fx.Node] = {}
        self.received: dict[str, fx.Node] = {}
        self.root = nn.Module()
        self.batch: fx.Node | None = None
        self.changed = {node for index in nodes for node in exported.changed_at.get(index, ())}

    def cut(self, device: torch.device) -> ExportProgram:
        """Return the program."""
        made = self._made()
        reassigned = {
            name: node for name, node in self.exported.reassigned.items() if self._is_here(self.exported.value_of(node))
        }
        for index in self.nodes:
            if not self.source.nodes[index].is_free:
                for node in self.exported.fx_of[index]:
                    self._copy(node)
        results = [self._sent(self.exported.fx_values[value]) for value in made]
        results += [self._copy(node) for node in reassigned.values()]
        self.body.output(tuple(results))
        self._order_arguments()
        return ExportProgram(
            fx.GraphModule(self.root, self.body),
            held_names=tuple(self.held),
            inputs=tuple(self.received),
            outputs=tuple(self.source.values[value].name for value in made),
            reassigned=tuple(reassigned),
            device=device,
        )

    def _sent(self, node: fx.Node) -> fx.Node:
        """Return the node to send: a copy if it is the memory of a buffer, which the next micro-batch may change."""
        copied = self._copy(node)
        is_held = node in self.exported.of_buffers
        return self.body.call_function(torch.ops.aten.clone.default, (copied,)) if is_held else copied

    def _made(self) -> list[int]:
        """Return the values of this stage that later stages or the caller need."""
        last, end = self.source.last_use_of, self.nodes.stop
        made = [
            value for index in self.nodes if not self.source.nodes[index].is_free
            for value in self.source.nodes[index].outputs if last[value] >= end
        ]  # fmt: skip
        if self.is_last:
            made += [v for v in self.source.outputs if self.source.values[v].producer >= 0 and self.source.is_free(v)]
        return made

    def _is_here(self, value: int) -> bool:
        producer = self.source.values[value].producer
        is_free = producer < 0 or self.source.nodes[producer].is_free
        return producer in self.nodes or (is_free and self.is_last)

    def _copy(self, node: fx.Node) -> fx.Node:
        """Return the node in this stage's program for a node of the trace: computed, received, or held."""
        if node in self.copy_of:
            return self.copy_of[node]
        made = self._make(node)
        self.copy_of[node] = made
        return made

    def _make(self, node: fx.Node) -> fx.Node:
        if node in self.exported.name_of:
            name = self.exported.name_of[node]
            if name not in self.held:
                self.held[name] = self.body.placeholder(f"held_{len(self.held)}")
            return self.held[name]
        if node in self.exported.versions_of and not self._is_made_here(node):
            return self._receive(node)
        if node.op == "get_attr":
            target = str(node.target)
            setattr(self.root, target, getattr(self.exported.root, target))
            return self.body.get_attr(target)
        size = affine(node.meta.get("val"), self.exported.batch_symbols)
        if size is not None and isinstance(node.meta.get("val"), torch.SymInt):
            return self._count(*size)
        for argument in node.all_input_nodes:
            self._copy(argument)
        if draws(node):
            self.body.call_function(enter, (node.name,))
        copied = self.body.node_copy(node, lambda argument: self.copy_of[argument])
        line = line_of_trace(node.meta.get("stack_trace") or "").removeprefix("at ")
        copied.meta = {SOURCE: line} if line else {}  # for error messages; the rest is not needed any more
        return copied

    def _is_made_here(self, node: fx.Node) -> bool:
        producer = self.exported.versions_of[node][0][0]
        return producer >= 0 and (producer in self.nodes or self.source.nodes[producer].is_free)

    def _receive(self, node: fx.Node) -> fx.Node:
        name = self.source.values[self.exported.value_of(node, before=self.nodes.start)].name
        self.received[name] = self.body.placeholder(f"value_{len(self.received)}")
        if node not in self.changed:
            return self.received[name]
        # the stage changes this value in place; it must not change the sender's memory or a leaf of autograd
        return self.body.call_function(torch.ops.aten.clone.default, (self.received[name],))

    def _count(self, fixed: int, per_sample: int) -> fx.Node:
        size = self._batch_size()
        grown = size if per_sample == 1 else self.body.call_function(operator.mul, (size, per_sample))
        return grown if fixed == 0 else self.body.call_function(operator.add, (grown, fixed))

    def _batch_size(self) -> fx.Node:
        self.batch = self.batch or self.body.placeholder("batch_size")
        return self.batch

    def _order_arguments(self) -> None:
        """Sort the arguments into the order of the call: held tensors, received values, batch size."""
        for node in reversed([*self.held.values(), *self.received.values(), self._batch_size()]):
            first = next(iter(self.body.nodes))
            if node is not first:
                first.prepend(node)


def visit_export(
    exported: ExportGraph, visitor: Visitor, call: Call, held: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Run all nodes in order on a device; the tensors of the call and the held tensors are on that device."""
    graph = exported.graph
    values: dict[int, torch.Tensor] = dict(zip(graph.inputs, call.tensors, strict=True))
    last = graph.last_use_of
    for index, node in enumerate(graph.nodes):
        run = _runner(exported, index, call.batch_size, device)
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
