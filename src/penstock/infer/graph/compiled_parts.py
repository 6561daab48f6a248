"""Compiled parts: parts of a program that Inductor compiles as one, each on one stream without waits inside.

    stream 0   [ a  b ]───────────[ e  f ]      e waits for d, so it starts a part
    stream 1   [ c  d ]──────────┘              another stream waits for d, so d ends a part

A part that draws random numbers is not compiled, because compiled code would draw others. A part that changes memory in
place is compiled only if nothing outside can see it: the memory is made and used within the part, by one operation
after the other. Compiled code may share memory where the model does not, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from penstock.compile.options import Options, compiled
from penstock.infer.graph.branches import Branches
from penstock.infer.graph.program_analysis import ProgramAnalysis
from penstock.model.capture.export.traced_operations import Families, draws, written_by

# arguments that switch off draws and changes: dropout, attention and batch norm in evaluation
_QUIET = {"train": (False,), "training": (False,), "p": (0.0,), "dropout_p": (0.0,), "dropout": (0.0,)}


def find_parts(analysis: ProgramAnalysis, branches: Branches) -> list[tuple[int, ...]]:
    """Return the parts in launch order; nodes that cannot be fused form parts of their own."""
    place_of = {node: index for index, node in enumerate(analysis.nodes)}
    part_of: dict[int, int] = {}
    parts: list[list[int]] = []
    open_of: dict[int, int] = {}  # for each stream, its open part
    for index, node in enumerate(analysis.nodes):
        stream = branches.stream_of[index]
        needed = [part_of[place_of[a]] for a in node.all_input_nodes if a in place_of]
        # numbers need no wait, but a later part has not computed them yet
        if branches.waits[index] or stream not in open_of or max(needed, default=0) > open_of[stream]:
            open_of[stream] = len(parts)
            parts.append([])
        parts[open_of[stream]].append(index)
        part_of[index] = open_of[stream]
        if index in branches.awaited:
            del open_of[stream]
    changed = _changed([*analysis.once, *analysis.nodes])
    found: list[tuple[int, ...]] = []
    for part in parts:
        can_be = _can_be_fused([analysis.nodes[index] for index in part], changed)
        found += [tuple(part)] if can_be else [(index,) for index in part]
    return found


def _can_be_fused(nodes: Sequence[fx.Node], changed: Mapping[fx.Node, Sequence[fx.Node]]) -> bool:
    """Return whether nodes can be compiled as one; `changed` has the nodes that share memory that is changed."""
    inside = set(nodes)
    touched = [changed[a] for node in nodes for a in (node, *node.all_input_nodes) if a in changed]
    if len(nodes) < 2 or any(draws(node) and not _is_quiet(node) for node in nodes):
        return False
    return all(inside.issuperset(family) and _is_private(family) for family in touched)


def _changed(calls: Sequence[fx.Node]) -> dict[fx.Node, Sequence[fx.Node]]:
    families = Families(calls)
    members = [families.of(written) for node in calls for written in _written(node)]
    return {node: family for family in members for node in family}


def _is_private(family: Sequence[fx.Node]) -> bool:
    """Return whether each node that shares memory is changed into the next, and has no other user."""
    order = {node: at for at, node in enumerate(next(iter(family)).graph.nodes)}
    members = sorted(family, key=order.__getitem__)
    return all(
        list(member.users) == [following] and _written(following) == [member] for member, following in pairwise(members)
    )


def _written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node changes in place; a batch norm in evaluation changes nothing."""
    is_norm = isinstance(node.target, torch._ops.OpOverload) and "batch_norm" in node.target._schema.name
    return [] if is_norm and _is_quiet(node) else written_by(node)


def _is_quiet(node: fx.Node) -> bool:
    """Return whether a node's arguments switch off draws and changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return any(
        given[name] in quiet for name, quiet in _QUIET.items() if isinstance(given.get(name), (bool, int, float))
    )


def compiled_part(
    nodes: Sequence[fx.Node], made: Sequence[fx.Node], analysis: ProgramAnalysis, options: Options
) -> Callable[[Mapping[fx.Node, Any]], Sequence[Any]]:
    """Return a function that computes the values `made` of a part; it is compiled at its first run."""
    body, copy_of = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = set(nodes)
    given = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    arguments = [node for node in given if node.op != "get_attr"]
    for node in arguments:
        copy_of[node] = body.placeholder(node.name)
    for node in (*(node for node in given if node.op == "get_attr"), *nodes):
        copy_of[node] = body.node_copy(node, copy_of.__getitem__)
    body.output(tuple(copy_of[node] for node in made))
    # a separate module per shape: torch stops compiling a module after too many shapes
    run = compiled(fx.GraphModule(analysis.root, body), options)

    def compute(known: Mapping[fx.Node, Any]) -> Sequence[Any]:
        found: Sequence[Any] = run(*(known[node] for node in arguments))
        return found

    return compute
