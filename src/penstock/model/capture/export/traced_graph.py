"""Traced graphs: turn a trace of torch.export into a Graph with its nodes, values and uncuttable positions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import fx, nn

from penstock.model.capture.export.symbolic_sizes import affine, hint
from penstock.model.capture.export.traced_operations import (
    Families,
    has_effect,
    is_check,
    is_number,
    is_part,
    is_tensor,
    module_of,
    op_name,
    open_regions,
    signature_of,
    stops_gradients,
    written_by,
)
from penstock.model.capture.export.tracing import Traced
from penstock.model.example import Call
from penstock.model.graph import Graph, Node, Parameter, Size, Value
from penstock.model.parameters import read_parameters
from penstock.model.source import line_of_trace


@dataclass(frozen=True)
class ExportGraph:
    """A Graph, with the fx nodes of its nodes and values."""

    graph: Graph  # the graph as pure data
    # for each node, its fx node, followed by the fx nodes that take its outputs apart
    fx_of: tuple[tuple[fx.Node, ...], ...]
    # for each fx node that is a value, its versions: pairs of a node and the index of the value that this node makes.
    # The first node makes the fx node's result; each later one changes it in place
    versions_of: dict[fx.Node, list[tuple[int, int]]]
    name_of: dict[fx.Node, str]  # the name of each placeholder of a parameter, buffer or constant
    constants: dict[str, torch.Tensor]  # the tensors that are part of the model's code, by name
    outputs: tuple[fx.Node, ...]  # the fx nodes of the model's results
    # for each buffer to which forward assigns another tensor, the fx node of this tensor
    reassigned: dict[str, fx.Node]
    # for each node that changes memory in place, the fx nodes that share this memory
    changed_at: dict[int, frozenset[fx.Node]]
    root: nn.Module  # the module that holds the graphs of nested operations
    batch_symbols: frozenset[Any] = field(default_factory=frozenset)  # the symbols of the batch size
    # the fx nodes that share memory with a buffer that is changed; they are sent as copies
    of_buffers: frozenset[fx.Node] = frozenset()

    @cached_property
    def fx_values(self) -> dict[int, fx.Node]:
        """The fx node of each value."""
        return {value: node for node, versions in self.versions_of.items() for _, value in versions}

    def value_of(self, node: fx.Node, before: int | None = None) -> int:
        """Return the index of the value that an fx node has before a node runs; by default after all nodes."""
        versions = self.versions_of[node]
        return next((value for at, value in reversed(versions) if before is None or at < before), versions[0][1])


class GraphReader:
    """Reads the graph of a traced model."""

    def __init__(self, traced: Traced, model: nn.Module, call: Call) -> None:
        self.traced, self.call = traced, call
        self.program = traced.program
        self.parameters, self.first_name_of = read_parameters(model)
        self.name_of: dict[fx.Node, str] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.values: list[Value] = []
        self.versions_of: dict[fx.Node, list[tuple[int, int]]] = {}
        self.changed_at: dict[int, frozenset[fx.Node]] = {}
        self.nodes: list[Node] = []
        self.fx_of: list[tuple[fx.Node, ...]] = []
        self.symbols: frozenset[Any] = frozenset()

    def read(self) -> ExportGraph:
        """Return the graph."""
        open_regions(self.program.graph_module)
        self._read_placeholders()
        output = next(node for node in self.program.graph.nodes if node.op == "output")
        returned = self._returned(output)
        self._remove_dead(output)
        self.place_of = {node: place for place, node in enumerate(self.program.graph.nodes)}
        self.families = Families(self._calls())
        mutated = {name for node, name in self.name_of.items() if self.families.is_changed(node)}
        mutated |= set(self.traced.reassigned)
        for node in self._calls():
            self._add_node(node, mutated)
        num = self.traced.num_outputs
        outputs, reassigned = returned[:num], dict(zip(self.traced.reassigned, returned[num:], strict=True))
        graph = Graph(
            nodes=tuple(self.nodes),
            values=tuple(self.values),
            inputs=tuple(range(len(self.call.tensors))),
            outputs=tuple(dict.fromkeys(self._value(node) for node in outputs)),
            parameters=self.parameters | {name: _constant(name, tensor) for name, tensor in self.constants.items()},
            batch_size=self.call.batch_size,
        )
        graph = replace(graph, uncuttable=self._uncuttable(graph) | self._around_changed_buffers(reassigned))
        return ExportGraph(
            graph, tuple(self.fx_of), self.versions_of, self.name_of, self.constants, tuple(outputs), reassigned,
            self.changed_at, self.program.graph_module, self.symbols, self._of_buffers(),
        )  # fmt: skip

    def _of_buffers(self) -> frozenset[fx.Node]:
        """Return the fx nodes that share memory with a buffer that is changed."""
        return frozenset(m for held in self.name_of if self.families.is_changed(held) for m in self.families.of(held))

    def _around_changed_buffers(self, reassigned: Mapping[str, fx.Node]) -> frozenset[int]:
        """Return the cuts that would separate the nodes that use a buffer's memory until its last change.

        All of these nodes must lie on the stage that holds the buffer. The result of the last change may go to any
        stage, because it is sent as a copy.
        """
        index_of = {node: index for index, group in enumerate(self.fx_of) for node in group}
        found: set[int] = set()
        for held in self.name_of:
            if not self.families.is_changed(held):
                continue
            members = set(self.families.of(held))
            writes = {index_of[n] for n in index_of if members & set(written_by(n))}
            last = {node for node in members if index_of.get(node) == max(writes, default=-1)}
            uses = {index_of[u] for m in members - last for u in m.users if u in index_of} | writes
            found |= set(range(min(uses, default=0) + 1, max(uses, default=0) + 1))
        for name, made in reassigned.items():  # from reading a buffer to computing its new tensor
            placeholders = [node for node, other in self.name_of.items() if other == name]
            uses = {index_of[user] for node in placeholders for user in node.users if user in index_of}
            if uses and made in index_of:
                found |= set(range(min(uses) + 1, max(*uses, index_of[made]) + 1))
        return frozenset(found)

    def _value(self, node: fx.Node) -> int:
        """Return the current value of an fx node."""
        return self.versions_of[node][-1][1]

    def _uncuttable(self, graph: Graph) -> frozenset[int]:
        """Return the cuts that two fx nodes with the same memory would cross before it is changed in place."""
        found = set()
        for changed_at, members in self.changed_at.items():
            alive = [
                {
                    cut
                    for at, v in self.versions_of[node]
                    for cut in range(at + 1, min(graph.last_use_of[v], changed_at) + 1)
                }
                for node in members
            ]
            crossed = Counter(cut for cuts in alive for cut in cuts)
            found |= {cut for cut, count in crossed.items() if count > 1 and cut > 0}
        return frozenset(found)

    def _read_placeholders(self) -> None:
        signature = self.program.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = signature.inputs_to_lifted_tensor_constants
        inputs = iter(self.call.names)
        symbols = set()
        dims = iter(self.call.batch_dims)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in held:
                self.name_of[node] = self.first_name_of[held[node.name].removeprefix("model.")]
            elif node.name in lifted:
                name = f"_constants.{lifted[node.name].replace('.', '_')}"
                self.name_of[node], self.constants[name] = name, self.program.constants[lifted[node.name]]
            elif node.name in signature.user_inputs:
                dim = next(dims)
                size = None if dim is None else node.meta["val"].shape[dim]
                symbols |= set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()
                self.symbols = frozenset(symbols)
                self._add_value(node, f"input:{next(inputs)}", producer=-1, has_grad=False)

    def _returned(self, output: fx.Node) -> list[fx.Node]:
        """Return the fx nodes of the results; a returned parameter gets an alias node, so that a node makes it."""
        found = []
        for result in cast("Iterable[fx.Node]", output.args[0]):
            if result in self.name_of:
                with self.program.graph.inserting_before(output):
                    alias = self.program.graph.call_function(torch.ops.aten.alias.default, (result,))
                alias.meta.update(result.meta)
                found.append(alias)
            else:
                found.append(result)
        self._kept = set(found)
        return found

    def _remove_dead(self, output: fx.Node) -> None:
        """Mark unused nodes and checks as dead; nodes with effects stay, for example those that draw random numbers."""
        self._dead: set[fx.Node] = set()
        for node in reversed(self.program.graph.nodes):
            if node.op in ("placeholder", "output") or node in self._kept:
                continue
            used = any(user not in self._dead and user is not output for user in node.users)
            if is_check(node) or (not used and not has_effect(node)):
                self._dead.add(node)

    def _calls(self) -> Iterator[fx.Node]:
        """Yield the fx nodes that become nodes: operations on tensors, without selected outputs and computed sizes."""
        for node in self.program.graph.nodes:
            if node.op == "call_function" and node not in self._dead and not is_part(node) and not is_number(node):
                yield node

    def _add_node(self, node: fx.Node, mutated: set[str]) -> None:
        index = len(self.nodes)
        inputs = self._inputs(node)
        parameters = self._held_names(node.all_input_nodes)
        parts = [user for user in node.users if is_part(user) and user not in self._dead]
        is_free = (
            not has_effect(node)
            and not self.families.is_changed(node, *parts, *node.all_input_nodes)  # otherwise its position matters
            and not set(parameters) & mutated
            and all(self.parameters[n].is_buffer for n in parameters if n in self.parameters)
            and all(self.values[v].producer < 0 or self.nodes[self.values[v].producer].is_free for v in inputs)
        )
        has_grad = not stops_gradients(node) and (
            any(self.values[v].has_grad for v in inputs)
            or any(self.parameters[n].is_trainable for n in parameters if n in self.parameters)
        )
        made = [part for part in parts if is_tensor(part)] or ([node] if is_tensor(node) else [])
        outputs = [self._add_value(part, part.name, producer=index, has_grad=has_grad) for part in made]
        used, versions = self._add_versions(node, index, has_grad, {node, *parts})
        inputs, outputs = tuple(dict.fromkeys((*inputs, *used))), outputs + versions
        self.nodes.append(
            Node(
                name=node.name,
                op=op_name(node),
                module=module_of(node),
                inputs=inputs,
                outputs=tuple(outputs),
                parameters=parameters,
                signature=signature_of(node, held=self.name_of),
                is_free=is_free,
                source=line_of_trace(node.meta.get("stack_trace") or "").removeprefix("at "),
            )
        )
        self.fx_of.append((node, *parts))

    def _add_versions(
        self, node: fx.Node, index: int, has_grad: bool, own: set[fx.Node]
    ) -> tuple[list[int], list[int]]:
        """Add a new version of each fx node that shares memory with a changed argument and is used later.

        Returns:
            The values before the change, which the node uses, and the new values, which it makes.
        """
        written = [argument for argument in written_by(node) if argument in self.versions_of]
        if not written:
            return [], []
        members = {m for argument in written for m in self.families.of(argument) if m in self.versions_of}
        self.changed_at[index] = frozenset(members)
        here = self.place_of[node]
        later = [m for m in members - own if any(self._is_later(user, here) for user in m.users) or m in self._kept]
        used, made = [], []
        for member in sorted(later, key=lambda m: self.place_of[m]):
            used.append(self._value(member))
            had_grad = self.values[self._value(member)].has_grad
            made.append(
                self._add_value(member, f"{member.name}@{index}", producer=index, has_grad=has_grad or had_grad)
            )
        return used, made

    def _is_later(self, user: fx.Node, here: int) -> bool:
        return self.place_of.get(user, -1) > here and user not in self._dead

    def _inputs(self, node: fx.Node) -> tuple[int, ...]:
        """Return the values that a node uses, including those whose sizes it uses."""
        found: list[int] = []
        for argument in node.all_input_nodes:
            if argument in self.versions_of:
                found.append(self._value(argument))
            elif is_number(argument) and affine(argument.meta.get("val"), self.symbols) is None:
                found.extend(self._inputs(argument))  # a size that depends on more than the batch size
        return tuple(dict.fromkeys(found))

    def _held_names(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.name_of[node] for node in nodes if node in self.name_of))

    def _add_value(self, node: fx.Node, name: str, *, producer: int, has_grad: bool) -> int:
        tensor = node.meta["val"]
        sizes = [affine(size, self.symbols) for size in tensor.shape]
        known = [
            Size(*size) if size is not None else Size(hint(raw)) for size, raw in zip(sizes, tensor.shape, strict=True)
        ]
        self.versions_of.setdefault(node, []).append((producer, len(self.values)))
        self.values.append(
            Value(
                name=name,
                producer=producer,
                shape=tuple(known),
                dtype=str(tensor.dtype).removeprefix("torch."),
                item_bytes=tensor.element_size(),
                has_grad=has_grad and (tensor.is_floating_point() or tensor.is_complex()),
                is_dynamic=any(size is None for size in sizes),
            )
        )
        return len(self.values) - 1


def _constant(name: str, tensor: torch.Tensor) -> Parameter:
    return Parameter(name, tensor.numel() * tensor.element_size(), is_trainable=False, is_buffer=True)
