"""Graph: a captured model as pure data: the nodes in execution order, the values between them, and the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from penstock.errors import GraphError


@dataclass(frozen=True)
class Size:
    """One dimension of a value: a fixed part, and a part per sample of the batch.

    >>> str(Size(0, 2)), Size(1, 2).at(4)
    ('2·batch', 9)
    """

    fixed: int
    per_sample: int = 0

    @classmethod
    def seen(cls, size: int, with_one_more: int, batch_size: int) -> Size:
        """Return the size of a dimension, from its length for a batch and for a batch with one more sample.

        >>> Size.seen(9, 11, batch_size=4)
        Size(fixed=1, per_sample=2)
        """
        return cls(size - (with_one_more - size) * batch_size, with_one_more - size)

    def at(self, batch_size: int) -> int:
        """Return the length of the dimension for a batch size."""
        return self.fixed + self.per_sample * batch_size

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.fixed)
        grows = "batch" if self.per_sample == 1 else f"{self.per_sample}·batch"
        return f"{grows}{self.fixed:+d}" if self.fixed else grows


@dataclass(frozen=True)
class Value:
    """A tensor that a node makes, or that the model is called with.

    Attributes:
        name: the name, unique in its graph.
        producer: the index of the node that makes it; -1 for an input of the model.
        shape: each dimension as a function of the batch size.
        dtype: torch's name without the prefix `torch.`.
        item_bytes: the bytes of one element.
        has_grad: whether a gradient flows back through it.
        is_dynamic: whether a dimension depends on data, or is not a linear function of the batch size; `shape` is then
            the shape during the capture.
    """

    name: str
    producer: int
    shape: tuple[Size, ...]
    dtype: str
    item_bytes: int
    has_grad: bool = False
    is_dynamic: bool = False

    def bytes_at(self, batch_size: int) -> int:
        """Return its bytes for a batch size."""
        return self.item_bytes * math.prod(max(0, size.at(batch_size)) for size in self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class Parameter:
    """A parameter or a buffer, under the model's own name.

    Attributes:
        name: the first of its names.
        num_bytes: the bytes of the whole tensor.
        is_trainable: whether it gets a gradient; False for a buffer.
        is_buffer: whether it is a buffer.
        aliases: its other names, if modules share it.
    """

    name: str
    num_bytes: int
    is_trainable: bool = True
    is_buffer: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One thing that the model does: an operation, or the call of a module.

    Attributes:
        name: the name, unique in its graph.
        op: the operation or the module's class.
        module: the path of the module that contains it; "" for the model itself.
        inputs: the indices of the values that it uses.
        outputs: the indices of the values that it makes.
        parameters: the names of the parameters and buffers that it uses.
        signature: a text; two nodes with the same signature and inputs of the same shapes do the same work.
        is_free: whether it costs almost nothing and depends only on the inputs (masks, positions). Each stage that
            needs it computes it, so its values never cross a cut.
        source: the file and the line in the user's model, if known.
    """

    name: str
    op: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    signature: str = ""
    is_free: bool = False
    source: str = ""


@dataclass(frozen=True)
class Graph:
    """A captured model. A cut at `c` divides it between node c - 1 and node c.

    Attributes:
        nodes: the nodes in execution order.
        values: the values that the nodes make or the caller gives.
        inputs: the indices of the values with which the model is called.
        outputs: the indices of the values that it returns.
        parameters: all parameters and buffers, by name.
        batch_size: the number of samples in the captured example.
        uncuttable: the positions where no cut may lie, for example because an in-place operation changes several values
            that would cross.
    """

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    batch_size: int = 1
    uncuttable: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        faults = list(_faults(self))
        if faults:
            raise GraphError("; ".join(faults[:5]))

    @cached_property
    def last_use_of(self) -> tuple[int, ...]:
        """For each value, the last node that uses it; the number of nodes for a model output; -1 if unused."""
        last = [-1] * len(self.values)
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                last[value] = index
        for value in self.outputs:
            last[value] = len(self.nodes)
        return tuple(last)

    @cached_property
    def users_of(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the nodes that use it, in order."""
        users: list[list[int]] = [[] for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                users[value].append(index)
        return tuple(tuple(nodes) for nodes in users)

    def is_free(self, value: int) -> bool:
        """Return whether each stage computes a value itself or gets it from the caller."""
        producer = self.values[value].producer
        return producer < 0 or self.nodes[producer].is_free

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Return the values that are made before a cut and used after it, including those that skip stages."""
        return tuple(
            index
            for index, value in enumerate(self.values)
            if 0 <= value.producer < cut <= self.last_use_of[index] and not self.nodes[value.producer].is_free
        )

    def crossing_bytes(self, batch_size: int | None = None, *, of_gradients: bool = False) -> tuple[int, ...]:
        """Return the bytes that cross each cut, from 0 to the number of nodes; model outputs cross all later cuts.

        With `of_gradients`, only values with a gradient count.
        """
        change = [0] * (len(self.nodes) + 2)
        size = self.batch_size if batch_size is None else batch_size
        for index, value in enumerate(self.values):
            last = self.last_use_of[index]
            if last > value.producer and not self.is_free(index) and (value.has_grad or not of_gradients):
                change[value.producer + 1] += value.bytes_at(size)
                change[last + 1] -= value.bytes_at(size)
        return tuple(accumulate(change))[: len(self.nodes) + 1]

    def stages(self, cuts: Sequence[int]) -> list[range]:
        """Return the nodes of each stage.

        Raises:
            GraphError: as in `check_cuts`.
        """
        self.check_cuts(cuts)
        return [range(a, b) for a, b in pairwise([0, *cuts, len(self.nodes)])]

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Check that cuts are in order, leave no stage empty, and lie only where cuts are allowed.

        Raises:
            GraphError: if a cut is wrong; lists all faults.
        """
        faults = [f"cut {c} lies outside of the {len(self.nodes)} nodes" for c in cuts if not 0 < c < len(self.nodes)]
        faults += [f"cut {b} does not come after cut {a}" for a, b in pairwise(cuts) if b <= a]
        faults += [
            f"no cut may lie at {c} (in {self.nodes[c].module or 'the model'}): values that cross are changed in place"
            for c in cuts
            if c in self.uncuttable
        ]
        if faults:
            raise GraphError("; ".join(faults))

    def parameters_of(self, nodes: Iterable[int]) -> tuple[str, ...]:
        """Return the names of the parameters and buffers that these nodes use, each once, in order."""
        return tuple(dict.fromkeys(name for index in nodes for name in self.nodes[index].parameters))


def graph_of(plain: Mapping[str, Any]) -> Graph:
    """Return the graph from the result of `dataclasses.asdict`, also after a round trip through JSON."""

    def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}

    return Graph(
        nodes=tuple(Node(**tuples(node)) for node in plain["nodes"]),
        values=tuple(
            Value(**(tuples(value) | {"shape": tuple(Size(**size) for size in value["shape"])}))
            for value in plain["values"]
        ),
        inputs=tuple(plain["inputs"]),
        outputs=tuple(plain["outputs"]),
        parameters={name: Parameter(**tuples(parameter)) for name, parameter in plain["parameters"].items()},
        batch_size=plain["batch_size"],
        uncuttable=frozenset(plain["uncuttable"]),
    )


def _faults(graph: Graph) -> Iterable[str]:
    names = [node.name for node in graph.nodes]
    if len(set(names)) < len(names):
        yield "two nodes have the same name"
    for index, node in enumerate(graph.nodes):
        if any(not 0 <= value < len(graph.values) for value in (*node.inputs, *node.outputs)):
            yield f"node {node.name} refers to values that do not exist"
            continue
        if any(graph.values[value].producer >= index for value in node.inputs):
            yield f"node {node.name} uses a value before it is made"
        if any(graph.values[value].producer != index for value in node.outputs):
            yield f"node {node.name} makes a value that names another producer"
        unknown = [name for name in node.parameters if name not in graph.parameters]
        if unknown:
            yield f"node {node.name} uses unknown parameters: {', '.join(unknown)}"


def held_by_stage(graph: Graph, cuts: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the parameters and buffers that each stage holds: those that it uses, and a share of the unused ones.

    Every tensor must be on some stage. An unused one goes with the one before it in the order of the model.
    """
    held = [dict.fromkeys(graph.parameters_of(nodes)) for nodes in graph.stages(cuts)]
    last_stage_of = {name: stage for stage, names in enumerate(held) for name in names}
    now = 0
    for name in graph.parameters:
        now = last_stage_of.get(name, now)
        if name not in last_stage_of:
            held[now][name] = None
    return [tuple(names) for names in held]


def match_cuts(graph: Graph, cuts: Sequence[int], other: Graph) -> tuple[int, ...]:
    """Return cuts of another graph of the same model, so that its nodes lie on the stages of the parameters they use.

    The cut keeps its distance, in nodes, from the last node with parameters before it.
    """
    found: list[int] = []
    for number, cut in enumerate(cuts):
        before = _last_with_parameters(graph, cut)
        distance = cut - 1 - before
        at = _same_use(graph, before, other) + 1 + distance if before >= 0 else cut
        limit = _first_with_parameters(graph, cut)
        most = _same_use(graph, limit, other) if limit < len(graph.nodes) else len(other.nodes) - 1
        lowest = (found[-1] if found else 0) + 1
        highest = len(other.nodes) - (len(cuts) - number)
        at = min(max(min(at, most), lowest), highest)
        while at in other.uncuttable and at < highest:
            at += 1
        found.append(at)
    return tuple(found)


def _last_with_parameters(graph: Graph, cut: int) -> int:
    return next((index for index in range(cut - 1, -1, -1) if graph.nodes[index].parameters), -1)


def _first_with_parameters(graph: Graph, cut: int) -> int:
    return next((index for index in range(cut, len(graph.nodes)) if graph.nodes[index].parameters), len(graph.nodes))


def _same_use(graph: Graph, index: int, other: Graph) -> int:
    """Return the node of the other graph that is the same use (first, second, ...) of the same parameters."""
    names = graph.nodes[index].parameters
    count = sum(node.parameters == names for node in graph.nodes[:index])
    alike = [i for i, node in enumerate(other.nodes) if node.parameters == names]
    if not alike:
        alike = [i for i, node in enumerate(other.nodes) if set(node.parameters) & set(names)]
    if not alike:
        return round(index * len(other.nodes) / len(graph.nodes))
    return alike[min(count, len(alike) - 1)]
