"""Program analysis: an exported program as plain data: dependencies, estimated times, and what is computed only once.

Values that depend neither on an input nor on a weight, such as positions and masks, are the same in every call. They
are computed once per shape, before the graph is captured. That saves their kernels. It also allows operations that a
capture would refuse, such as tensors that the model creates on the host.  An operation comes after those whose values
it uses. If memory is changed in place, that is not enough: the change must come after all earlier reads of the memory,
and before all later reads. On one stream, the order of the model guarantees this; between streams, it must be a
dependency.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from penstock.devices.sanitizer import unsanitized
from penstock.infer.graph.branches import GraphNode
from penstock.infer.graph.patch_convolutions import convolutions_as_products, is_convolution
from penstock.infer.graph.row_selection import can_use_fewer_rows, reads_rows, use_fewer_rows
from penstock.model.capture.export.exported_stage import ExportProgram
from penstock.model.capture.export.traced_operations import Families, draws, op_name, written_by
from penstock.model.profiling.device_rates import Rates
from penstock.model.profiling.operation_counts import Tally

_CONSTANT = "_constants."  # name prefix of tensors in the model's code
_RATES = "h100"  # only the ratios of compute, memory and launch times matter


@dataclass(frozen=True)
class ProgramAnalysis:
    """An analyzed program."""

    root: nn.Module  # the module with the nested graphs
    arguments: tuple[fx.Node, ...]  # the placeholders in order: held tensors, inputs, batch size
    once: tuple[fx.Node, ...]  # the operations that run once per shape, in order
    nodes: tuple[fx.Node, ...]  # the operations that run in every call, in order
    graph_nodes: tuple[GraphNode, ...] = field(repr=False)  # the plain data of these operations
    outputs: tuple[fx.Node, ...]  # the nodes whose values the program returns
    changed: tuple[str, ...]  # the names of the parameters and buffers that the program changes in place
    num_products: int = 0  # the number of convolutions that became matrix products
    num_fewer: int = 0  # the number of operations that compute only some of their rows


def analyze_program(
    program: ExportProgram, arguments: Sequence[Any], *, others: Iterable[Sequence[Any]] = ()
) -> ProgramAnalysis:
    """Analyze a program; patch convolutions become products, and unused rows are not computed.

    Args:
        program: the whole model, in evaluation.
        arguments: the held tensors, the inputs and the batch size of the example. Only their metadata are used.
        others: the same for other batch sizes: an optimization must be valid for all of them.
    """
    graph, root = program.module.graph, program.module
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    given = dict(zip(placeholders, arguments, strict=True))
    num_products, num_fewer = _optimize(
        graph, root, given, (dict(zip(placeholders, other, strict=True)) for other in others)
    )
    calls = [node for node in graph.nodes if node.op == "call_function"]
    families = Families(calls)
    held = dict(zip(placeholders, program.held_names, strict=False))
    is_once = _done_once(calls, placeholders[len(held) + len(program.inputs) :], held, families)
    nodes = tuple(node for node in calls if node not in is_once)
    output = next(node for node in graph.nodes if node.op == "output")
    try:
        estimates = _estimate(calls, root, given)
    except Exception:  # an operation that needs real data: give all the same time
        estimates = dict.fromkeys(calls, _Estimate(Rates.of(_RATES).launch_seconds, has_tensor=True))
    return ProgramAnalysis(
        root=root,
        arguments=placeholders,
        once=tuple(node for node in calls if node in is_once),
        nodes=nodes,
        graph_nodes=tuple(_graph_nodes(nodes, families, estimates)),
        outputs=tuple(output.args[0]),
        changed=tuple(name for node, name in held.items() if families.is_changed(node)),
        num_products=num_products,
        num_fewer=num_fewer,
    )


def _optimize(
    graph: fx.Graph, root: nn.Module, given: Mapping[fx.Node, Any], others: Iterable[Mapping[fx.Node, Any]]
) -> tuple[int, int]:
    """Optimize a graph; return the number of products, and of operations with fewer rows."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any(is_convolution(node) or reads_rows(node) for node in calls):
        return 0, 0
    values = _fake_values(calls, root, given)
    if values is None:
        return 0, 0
    num_fewer = 0
    if can_use_fewer_rows(graph, values):
        several = [values, *(_fake_values(calls, root, other) for other in others)]
        known = [one for one in several if one is not None]
        if len(known) == len(several):  # an optimization must be valid for all batch sizes
            num_fewer = use_fewer_rows(graph, known)
    return convolutions_as_products(graph, values), num_fewer


def _done_once(
    calls: Sequence[fx.Node], sizes: Iterable[fx.Node], held: Mapping[fx.Node, str], families: Families
) -> set[fx.Node]:
    """Return the nodes that depend only on the batch size and the model's code."""
    fixed = {*sizes, *(node for node, name in held.items() if name.startswith(_CONSTANT))}
    # memory that a call changes: held tensors, and constants that a non-constant operation changes
    barred = {member for node in held if families.is_changed(node) for member in families.of(node)}
    while True:
        once: set[fx.Node] = set()
        known = fixed - barred
        for node in calls:
            needed = [a for a in node.all_input_nodes if a.op != "get_attr"]
            if node not in barred and not draws(node) and all(a in once or a in known for a in needed):
                once.add(node)
        writers = [node for node in calls if node not in once]
        found = {member for node in writers for changed in written_by(node) for member in families.of(changed)}
        if found <= barred:
            return once
        barred |= found


@dataclass(frozen=True)
class _Estimate:
    seconds: float
    has_tensor: bool


def _estimate(calls: Sequence[fx.Node], root: nn.Module, given: Mapping[fx.Node, Any]) -> dict[fx.Node, _Estimate]:
    """Estimate the time of each node from its operations and bytes, by a run with fake tensors."""
    rates, found = Rates.of(_RATES), dict[fx.Node, _Estimate]()
    with _fake_tensors(given) as known:
        for node in calls:
            with Tally(rates) as tally:
                known[node] = compute(node, known, root)
            has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(known[node]))
            found[node] = _Estimate(tally.seconds, has_tensor)
    return found


def _graph_nodes(
    nodes: Sequence[fx.Node], families: Families, estimates: Mapping[fx.Node, _Estimate]
) -> Iterator[GraphNode]:
    """Yield the plain data of each node."""
    place_of = {node: index for index, node in enumerate(nodes)}
    changes = _Changes(families)
    for index, node in enumerate(nodes):
        after = {place_of[a] for a in node.all_input_nodes if a in place_of and estimates[a].has_tensor}
        after |= changes.before(index, node)
        # the host knows a number, such as a size, without waiting for the GPU
        is_number = not estimates[node].has_tensor and index not in changes.touched
        name = f"{node.name} ({op_name(node)})"
        yield GraphNode(name, () if is_number else tuple(sorted(after)), estimates[node].seconds)


class _Changes:
    """Orders reads and in-place changes of the same memory."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._last_write: dict[fx.Node, int] = {}
        self._reads: dict[fx.Node, list[int]] = {}
        self.touched: set[int] = set()

    def before(self, index: int, node: fx.Node) -> set[int]:
        """Return the nodes that must come first because of in-place changes to memory that this node uses."""
        written = {self._family(argument) for argument in written_by(node)}
        used = {self._family(n) for n in (node, *node.all_input_nodes) if self._families.is_changed(n)}
        found: set[int] = set()
        for family in used | written:
            if family in self._last_write:
                found.add(self._last_write[family])
            if family in written:
                found.update(self._reads.pop(family, ()))
                self._last_write[family] = index
            else:
                self._reads.setdefault(family, []).append(index)
            self.touched.add(index)
        return found

    def _family(self, node: fx.Node) -> fx.Node:
        """Return the representative of all nodes that share memory with a node."""
        return self._families.of(node)[0]


# ---- running nodes one by one, with real or with fake tensors


def compute(node: fx.Node, known: Mapping[fx.Node, Any], root: nn.Module) -> Any:  # noqa: ANN401 - tensors, numbers
    """Compute one node from known values."""

    def look_up(argument: fx.Node) -> Any:  # noqa: ANN401
        return getattr(root, str(argument.target)) if argument.op == "get_attr" else known[argument]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), look_up)
    return node.target(*args, **kwargs)  # type: ignore[operator]


@contextmanager
def _fake_tensors(given: Mapping[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """Yield the given values with fake tensors; results of operations on them are fake too."""
    with unsanitized(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fakes:
        yield {
            node: fakes.from_tensor(value.detach(), static_shapes=True) if isinstance(value, torch.Tensor) else value
            for node, value in given.items()
        }


def _fake_values(calls: Sequence[fx.Node], root: nn.Module, given: Mapping[fx.Node, Any]) -> dict[fx.Node, Any] | None:
    """Return the fake value of each node; None if that is not possible."""
    try:
        with _fake_tensors(given) as known:
            for node in calls:
                known[node] = compute(node, known, root)
    except Exception:  # an operation that needs real data, or a batch size that the model does not support
        return None
    return known
