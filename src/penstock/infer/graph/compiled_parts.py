"""Parts: pieces of a program that Inductor compiles as one, each on one stream, with nothing to wait for inside.

    stream 0   [ a  b ]───────────[ e  f ]      e waits for d: it begins a part
    stream 1   [ c  d ]──────────┘              d is waited for: it ends one

A piece that draws random numbers stays as it is, for compiled code would draw others. So does one with memory that is
changed in place, unless nobody could tell: what is changed is made and used up there, one operation after the other.
Compiled code may share memory where the model does not, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from penstock.compile.options import Options, compiled
from penstock.infer.graph.branches import Branches
from penstock.infer.graph.program_analysis import Reading
from penstock.model.capture.export.traced_operations import Families, draws, written_by

__all__ = ["compiled_part", "find_parts"]

# arguments with which an operation neither draws nor changes anything: dropout, attention and batch norm in evaluation
_QUIET = {"train": (False,), "training": (False,), "p": (0.0,), "dropout_p": (0.0,), "dropout": (0.0,)}


def find_parts(reading: Reading, branches: Branches) -> list[tuple[int, ...]]:
    """Return the nodes in pieces, in an order in which they can be given to a GPU; those that cannot be fused alone."""
    place_of = {node: index for index, node in enumerate(reading.nodes)}
    part_of: dict[int, int] = {}
    parts: list[list[int]] = []
    open_of: dict[int, int] = {}  # for each stream the part that goes on
    for index, node in enumerate(reading.nodes):
        stream = branches.stream_of[index]
        needed = [part_of[place_of[a]] for a in node.all_input_nodes if a in place_of]
        # a number is not waited for, but a part that comes later has not made it yet
        if branches.waits[index] or stream not in open_of or max(needed, default=0) > open_of[stream]:
            open_of[stream] = len(parts)
            parts.append([])
        parts[open_of[stream]].append(index)
        part_of[index] = open_of[stream]
        if index in branches.awaited:
            del open_of[stream]
    changed = _changed([*reading.once, *reading.nodes])
    found: list[tuple[int, ...]] = []
    for part in parts:
        can_be = _can_be_fused([reading.nodes[index] for index in part], changed)
        found += [tuple(part)] if can_be else [(index,) for index in part]
    return found


def _can_be_fused(nodes: Sequence[fx.Node], changed: Mapping[fx.Node, Sequence[fx.Node]]) -> bool:
    """Return whether nodes can be compiled as one.

    Args:
        nodes: of a part.
        changed: for each node whose memory is changed in place all that share it.
    """
    inside = set(nodes)
    touched = [changed[a] for node in nodes for a in (node, *node.all_input_nodes) if a in changed]
    if len(nodes) < 2 or any(draws(node) and not _is_quiet(node) for node in nodes):
        return False
    return all(inside.issuperset(family) and _is_used_up(family) for family in touched)


def _changed(calls: Sequence[fx.Node]) -> dict[fx.Node, Sequence[fx.Node]]:
    families = Families(calls)
    members = [families.of(written) for node in calls for written in _written(node)]
    return {node: family for family in members for node in family}


def _is_used_up(family: Sequence[fx.Node]) -> bool:
    """Return whether each of those that share memory is changed into the next, and used by nobody else."""
    order = {node: at for at, node in enumerate(next(iter(family)).graph.nodes)}
    members = sorted(family, key=order.__getitem__)
    return all(
        list(member.users) == [following] and _written(following) == [member] for member, following in pairwise(members)
    )


def _written(node: fx.Node) -> list[fx.Node]:
    """Return what a node changes in place; a batch norm in evaluation leaves its statistics as they are."""
    is_norm = isinstance(node.target, torch._ops.OpOverload) and "batch_norm" in node.target._schema.name
    return [] if is_norm and _is_quiet(node) else written_by(node)


def _is_quiet(node: fx.Node) -> bool:
    """Return whether a node is told to do nothing but compute."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return any(
        given[name] in quiet for name, quiet in _QUIET.items() if isinstance(given.get(name), (bool, int, float))
    )


def compiled_part(
    nodes: Sequence[fx.Node], made: Sequence[fx.Node], reading: Reading, options: Options
) -> Callable[[Mapping[fx.Node, Any]], Sequence[Any]]:
    """Return what computes some values of a part from what is known, compiled when it first runs."""
    body, copy_of = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = set(nodes)
    given = list(dict.fromkeys(a for node in nodes for a in node.all_input_nodes if a not in inside))
    arguments = [node for node in given if node.op != "get_attr"]
    for node in arguments:
        copy_of[node] = body.placeholder(node.name)
    for node in (*(node for node in given if node.op == "get_attr"), *nodes):
        copy_of[node] = body.node_copy(node, copy_of.__getitem__)
    body.output(tuple(copy_of[node] for node in made))
    # a module of its own for every shape: what torch compiles anew for too many of them it leaves as it is
    run = compiled(fx.GraphModule(reading.root, body), options)

    def compute(known: Mapping[fx.Node, Any]) -> Sequence[Any]:
        found: Sequence[Any] = run(*(known[node] for node in arguments))
        return found

    return compute
