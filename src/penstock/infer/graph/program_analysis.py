"""Reading: an exported program as plain work: what each operation comes after, what it takes, what is made only once.

What follows neither from an input nor from a weight (positions, masks) is the same in every call. It is made once for
each shape, before a graph is captured. That saves its kernels, and lets in what a capture would refuse: a tensor that
the model's code makes on the host.

An operation comes after those whose values it uses. Where memory is changed in place that is not enough: the change
must come after all that read the memory before it, and before all that read it after. On one stream the order of the
model sees to that; between streams it has to be said.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from penstock.infer.graph.branches import Work
from penstock.infer.graph.node_execution import compute, shown_for, without_memory
from penstock.infer.graph.patch_convolutions import as_products, is_convolution
from penstock.infer.graph.row_selection import asks_for_rows, could_be_fewer, for_fewer_rows
from penstock.model.capture.export.exported_stage import ExportProgram
from penstock.model.capture.export.traced_operations import Families, draws, op_name, written_by
from penstock.model.profiling.device_rates import Rates
from penstock.model.profiling.operation_counts import Tally

__all__ = ["Reading", "read_program"]

_CONSTANT = "_constants."  # what the names of tensors in the model's code begin with
_RATES = "h100"  # only relations count: of compute to memory, and of both to a launch


@dataclass(frozen=True)
class Reading:
    """An exported program, read.

    Attributes:
        root: where nested graphs are found.
        arguments: the placeholders, in order: what is held, the inputs, the batch size.
        once: the operations that are done once a shape, in order.
        nodes: those that are done in every call, in order.
        works: for each of these the plain data.
        outputs: whose values the program returns.
        changed: names of the parameters and buffers that it changes in place.
        num_products: how many convolutions became products of matrices.
        num_fewer: how many operations work on fewer rows than in the model, for nobody asks for the others.
    """

    root: nn.Module
    arguments: tuple[fx.Node, ...]
    once: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    works: tuple[Work, ...] = field(repr=False)
    outputs: tuple[fx.Node, ...]
    changed: tuple[str, ...]
    num_products: int = 0
    num_fewer: int = 0


def read_program(program: ExportProgram, arguments: Sequence[Any], *, others: Iterable[Sequence[Any]] = ()) -> Reading:
    """Read a program; convolutions over patches become products in it, and rows that nobody asks for are left out.

    Args:
        program: of the whole model, in evaluation.
        arguments: what it is called with: what is held, the inputs, the batch size. They are looked at, not used.
        others: the same for other numbers of samples: what is left out must be so for all.
    """
    graph, root = program.module.graph, program.module
    placeholders = tuple(node for node in graph.nodes if node.op == "placeholder")
    given = dict(zip(placeholders, arguments, strict=True))
    num_products, num_fewer = _improve(
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
    except Exception:  # an operation that cannot be run without memory: then all count the same
        estimates = dict.fromkeys(calls, _Estimate(Rates.of(_RATES).launch_seconds, has_tensor=True))
    return Reading(
        root=root,
        arguments=placeholders,
        once=tuple(node for node in calls if node in is_once),
        nodes=nodes,
        works=tuple(_works(nodes, families, estimates)),
        outputs=tuple(output.args[0]),
        changed=tuple(name for node, name in held.items() if families.is_changed(node)),
        num_products=num_products,
        num_fewer=num_fewer,
    )


def _improve(
    graph: fx.Graph, root: nn.Module, given: Mapping[fx.Node, Any], others: Iterable[Mapping[fx.Node, Any]]
) -> tuple[int, int]:
    """Change a graph to one that takes less time; return how many products there are now, and operations on less."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if not any(is_convolution(node) or asks_for_rows(node) for node in calls):
        return 0, 0
    shown = shown_for(calls, root, given)
    if shown is None:
        return 0, 0
    num_fewer = 0
    if could_be_fewer(graph, shown):
        several = [shown, *(shown_for(calls, root, other) for other in others)]
        known = [one for one in several if one is not None]
        if len(known) == len(several):  # what is so for some numbers of samples only is not for all calls
            num_fewer = for_fewer_rows(graph, known)
    return as_products(graph, shown), num_fewer


def _done_once(
    calls: Sequence[fx.Node], sizes: Iterable[fx.Node], held: Mapping[fx.Node, str], families: Families
) -> set[fx.Node]:
    """Return the nodes that follow from the batch size and the model's code alone."""
    fixed = {*sizes, *(node for node, name in held.items() if name.startswith(_CONSTANT))}
    # memory that a call leaves changed, and such that is made the same each time, and then changed by what is not
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
    """Return what each node takes, by its operations and bytes: the program is run on tensors without memory."""
    rates, found = Rates.of(_RATES), dict[fx.Node, _Estimate]()
    with without_memory(given) as known:
        for node in calls:
            with Tally(rates) as tally:
                known[node] = compute(node, known, root)
            has_tensor = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(known[node]))
            found[node] = _Estimate(tally.seconds, has_tensor)
    return found


def _works(nodes: Sequence[fx.Node], families: Families, estimates: Mapping[fx.Node, _Estimate]) -> Iterator[Work]:
    """Yield the plain data of each node."""
    place_of = {node: index for index, node in enumerate(nodes)}
    changes = _Changes(families)
    for index, node in enumerate(nodes):
        after = {place_of[a] for a in node.all_input_nodes if a in place_of and estimates[a].has_tensor}
        after |= changes.before(index, node)
        # a number, such as a size, is known to the host at once, whatever the GPU does
        is_number = not estimates[node].has_tensor and index not in changes.touched
        name = f"{node.name} ({op_name(node)})"
        yield Work(name, () if is_number else tuple(sorted(after)), estimates[node].seconds)


class _Changes:
    """Keeps those apart that read and that change the same memory."""

    def __init__(self, families: Families) -> None:
        self._families = families
        self._last_write: dict[fx.Node, int] = {}
        self._reads: dict[fx.Node, list[int]] = {}
        self.touched: set[int] = set()

    def before(self, index: int, node: fx.Node) -> set[int]:
        """Return what a node comes after, because memory that it reads or changes is changed, by it or by others."""
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
        """Return the one that stands for all that share memory with a node."""
        return self._families.of(node)[0]
