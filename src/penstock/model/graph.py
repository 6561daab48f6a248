"""Graph: a captured model as pure data: nodes in the order they run, values between them, parameters they use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from penstock.errors import GraphError

__all__ = ["Graph", "Node", "Parameter", "Size", "Value", "graph_of"]


@dataclass(frozen=True)
class Size:
    """One dimension of a value: so much, and so much more a sample of the batch.

    >>> str(Size(0, 2)), Size(1, 2).at(4)
    ('2·batch', 9)
    """

    fixed: int
    per_sample: int = 0

    @classmethod
    def seen(cls, size: int, with_one_more: int, batch_size: int) -> Size:
        """Return the size that was seen for a batch, and for a batch of one sample more.

        >>> Size.seen(9, 11, batch_size=4)
        Size(fixed=1, per_sample=2)
        """
        return cls(size - (with_one_more - size) * batch_size, with_one_more - size)

    def at(self, batch_size: int) -> int:
        """Return how long the dimension is for a batch."""
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
        name: unique in its graph.
        producer: the index of the node that makes it; -1 for an input of the model.
        shape: each dimension as a function of the batch size.
        dtype: as torch writes it, without the `torch.`.
        item_bytes: of one element.
        has_grad: a gradient flows back through it.
        is_dynamic: its shape depends on data, or is no such function; `shape` is then what was seen.
    """

    name: str
    producer: int
    shape: tuple[Size, ...]
    dtype: str
    item_bytes: int
    has_grad: bool = False
    is_dynamic: bool = False

    def bytes_at(self, batch_size: int) -> int:
        """Return how many bytes it takes for a batch."""
        count = self.item_bytes
        for size in self.shape:
            count *= max(0, size.at(batch_size))
        return count

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"


@dataclass(frozen=True)
class Parameter:
    """A parameter or a buffer, under the model's own name.

    Attributes:
        name: the first of its names.
        num_bytes: all of it.
        is_trainable: it gets a gradient; never so for a buffer.
        is_buffer: it is a buffer.
        aliases: its other names, where modules share it.
    """

    name: str
    num_bytes: int
    is_trainable: bool = True
    is_buffer: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One thing the model does: an operation, or the call of a module.

    Attributes:
        name: unique in its graph.
        op: the operation or the module's class.
        module: the path of the module that it happens in; "" for the model itself.
        inputs: indices of the values it uses.
        outputs: indices of the values it makes.
        parameters: names of the parameters and buffers it uses.
        signature: two nodes of the same signature, with inputs of the same shapes, do the same work.
        is_free: it costs next to nothing and follows from the inputs alone (masks, positions): each stage that needs it
            makes it for itself, so that it never crosses a cut.
        source: file and line in the user's model, if known.
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
        nodes: in the order they run.
        values: what the nodes and the caller make.
        inputs: indices of the values that the model is called with.
        outputs: indices of the values that it returns.
        parameters: all parameters and buffers, by name.
        batch_size: of the example that it was captured with.
        uncuttable: where no cut may lie, because an operation in place changes several values that would cross.
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
        """For each value the last node that uses it; the number of nodes for an output of the model; -1 if none."""
        last = [-1] * len(self.values)
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                last[value] = index
        for value in self.outputs:
            last[value] = len(self.nodes)
        return tuple(last)

    @cached_property
    def users_of(self) -> tuple[tuple[int, ...], ...]:
        """For each value the nodes that use it, in order."""
        users: list[list[int]] = [[] for _ in self.values]
        for index, node in enumerate(self.nodes):
            for value in dict.fromkeys(node.inputs):
                users[value].append(index)
        return tuple(tuple(nodes) for nodes in users)

    def is_free(self, value: int) -> bool:
        """Return whether each stage can make a value for itself, or gets it from the caller."""
        producer = self.values[value].producer
        return producer < 0 or self.nodes[producer].is_free

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Return the values that are made before a cut and used after it, those that skip a stage too."""
        return tuple(
            index
            for index, value in enumerate(self.values)
            if 0 <= value.producer < cut <= self.last_use_of[index] and not self.nodes[value.producer].is_free
        )

    def crossing_bytes(self, batch_size: int | None = None) -> tuple[int, ...]:
        """Return for each cut, from 0 to the number of nodes, how many bytes cross it; outputs cross to the end."""
        change = [0] * (len(self.nodes) + 2)
        size = self.batch_size if batch_size is None else batch_size
        for index, value in enumerate(self.values):
            last = self.last_use_of[index]
            if value.producer >= 0 and last > value.producer and not self.nodes[value.producer].is_free:
                change[value.producer + 1] += value.bytes_at(size)
                change[last + 1] -= value.bytes_at(size)
        return tuple(_running_sums(change))[: len(self.nodes) + 1]

    def stages(self, cuts: Sequence[int]) -> list[range]:
        """Return the nodes of each stage.

        Raises:
            GraphError: when cuts are not in order, or lie where none may.
        """
        self.check_cuts(cuts)
        return [range(a, b) for a, b in pairwise([0, *cuts, len(self.nodes)])]

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Raise if cuts are not in order, leave a stage without nodes, or lie where none may.

        Raises:
            GraphError: with all that is wrong.
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
        """Return the names of the parameters and buffers that some nodes use, each once, in order."""
        return tuple(dict.fromkeys(name for index in nodes for name in self.nodes[index].parameters))


def graph_of(plain: Mapping[str, Any]) -> Graph:
    """Return the graph that `dataclasses.asdict` has made plain data of, also after JSON has made lists of tuples."""

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


def _running_sums(changes: Iterable[int]) -> Iterable[int]:
    total = 0
    for change in changes:
        total += change
        yield total


def _faults(graph: Graph) -> Iterable[str]:
    names = [node.name for node in graph.nodes]
    if len(set(names)) < len(names):
        yield "two nodes have the same name"
    for index, node in enumerate(graph.nodes):
        if any(not 0 <= value < len(graph.values) for value in (*node.inputs, *node.outputs)):
            yield f"node {node.name} names values that do not exist"
            continue
        if any(graph.values[value].producer >= index for value in node.inputs):
            yield f"node {node.name} uses a value before it is made"
        if any(graph.values[value].producer != index for value in node.outputs):
            yield f"node {node.name} makes a value that says otherwise"
        unknown = [name for name in node.parameters if name not in graph.parameters]
        if unknown:
            yield f"node {node.name} uses unknown parameters: {', '.join(unknown)}"
