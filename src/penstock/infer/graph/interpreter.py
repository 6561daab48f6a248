"""Interpreter: runs a program part by part, each on its stream; on a CPU, one after the other.

    stream 0   ─(1)── a ─── b ──────── e ─(3)──    (1) side streams start after the earlier work of stream 0
                 │                  (2)    │       (2) a value crosses: its user e waits for d
    stream 1     └─── c ─── d ────── ┴ ────┘       (3) stream 0 ends after all other streams

During a capture, this becomes the edges of one CUDA graph, which a replay launches as a whole. A part is one operation,
or several operations that Inductor compiles as one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from penstock.compile.options import Options, compiled
from penstock.devices.cuda_streams import Event, OnStream, Stream
from penstock.infer.graph.branches import Branches
from penstock.infer.graph.program_analysis import ProgramAnalysis, compute
from penstock.model.capture.export.traced_operations import Families, draws, written_by

Known = dict[fx.Node, Any]

# arguments that switch off draws and changes: dropout, attention and batch norm in evaluation
_QUIET = {"train": (False,), "training": (False,), "p": (0.0,), "dropout_p": (0.0,), "dropout": (0.0,)}


@dataclass(frozen=True)
class _Step:
    """One part."""

    last: int  # the index of its last node
    made: tuple[fx.Node, ...]  # the nodes whose values it provides
    compute: Callable[[Known], Sequence[Any]]  # computes these values from known values
    waits: tuple[int, ...]  # the nodes on other streams to wait for
    is_awaited: bool  # whether another stream waits for its last node
    crossing: tuple[fx.Node, ...]  # the nodes whose values are used on another stream
    last_used: tuple[fx.Node, ...]  # the nodes whose values are not used afterwards


class Interpreter:
    """Runs a program on one stream per branch, one operation after the other.

    With Inductor's options, it compiles as few parts as possible, for the shapes of the first run.
    """

    def __init__(self, analysis: ProgramAnalysis, branches: Branches, *, options: Options | None = None) -> None:
        self.analysis, self.branches, self._options = analysis, branches, options
        parts = (
            find_parts(analysis, branches)
            if options is not None
            else [(index,) for index in range(len(analysis.nodes))]
        )
        steps = self._steps(parts)
        self._runs = [(stream, list(run)) for stream, run in groupby(steps, lambda step: branches.stream_of[step.last])]

    def _steps(self, parts: Sequence[tuple[int, ...]]) -> list[_Step]:
        analysis, branches = self.analysis, self.branches
        nodes_of = [[analysis.nodes[index] for index in part] for part in parts]
        users: dict[fx.Node, set[int]] = {}  # the parts that make or use a value
        for at, nodes in enumerate(nodes_of):
            for node in nodes:
                for value in (node, *node.all_input_nodes):
                    users.setdefault(value, set()).add(at)
        stays = {*analysis.outputs, *analysis.arguments, *analysis.once}
        is_known = {node for node, used in users.items() if len(used) > 1 or node in stays}
        last_used: dict[int, list[fx.Node]] = {}
        made_by = [tuple(node for node in nodes if len(nodes) == 1 or node in is_known) for nodes in nodes_of]
        for node in (node for made in made_by for node in made):
            if node not in stays:
                last_used.setdefault(max(users[node]), []).append(node)
        place_of = {node: index for index, node in enumerate(analysis.nodes)}
        return [
            _Step(
                part[-1],
                made,
                self._compute_function(nodes_of[at], made),
                waits=branches.waits[part[0]],
                is_awaited=part[-1] in branches.awaited,
                crossing=tuple(node for node in made if place_of[node] in branches.crossing),
                last_used=tuple(last_used.get(at, ())),
            )
            for at, (part, made) in enumerate(zip(parts, made_by, strict=True))
        ]

    def _compute_function(self, nodes: Sequence[fx.Node], made: Sequence[fx.Node]) -> Callable[[Known], Sequence[Any]]:
        if len(nodes) > 1:
            assert self._options is not None
            return compiled_part(nodes, made, self.analysis, self._options)
        (node,), root = nodes, self.analysis.root
        return lambda known: (compute(node, known, root),)

    def make_once(self, arguments: Sequence[Any]) -> Known:
        """Compute the values that are the same in every call with inputs of these shapes."""
        known: Known = dict(zip(self.analysis.arguments, arguments, strict=True))
        for node in self.analysis.once:
            known[node] = compute(node, known, self.analysis.root)
        return {node: known[node] for node in self.analysis.once}

    def run(
        self, arguments: Sequence[Any], once: Mapping[fx.Node, Any], streams: Sequence[Stream] | None = None
    ) -> tuple[Any, ...]:
        """Compute the outputs from the held tensors, the inputs and the batch size, and the result of `make_once`.

        There is one stream per branch, starting with the current one; on a CPU there are none.
        """
        known: Known = {**dict(zip(self.analysis.arguments, arguments, strict=True)), **once}
        # The allocator reuses freed memory of a stream on the same stream. It does not know that another stream may
        # still read it, so values that cross streams are kept until nothing more is allocated.
        crossed: list[Any] = []
        events: dict[int, Event] = {}
        for stream in _side_streams(streams):  # (1)
            stream.wait_stream(streams[0])  # type: ignore[index]  # side streams exist only if there are streams
        for number, steps in self._runs:
            with _on(streams, number):
                for step in steps:
                    for before in step.waits if streams is not None else ():  # (2)
                        streams[number].wait_event(events[before])  # type: ignore[index]
                    known.update(zip(step.made, step.compute(known), strict=True))
                    if step.is_awaited and streams is not None:
                        events[step.last] = streams[number].record_event()
                    crossed += [known[node] for node in step.crossing]
                    for node in step.last_used:
                        del known[node]
        for stream in _side_streams(streams):  # (3)
            streams[0].wait_stream(stream)  # type: ignore[index]
        return tuple(known[node] for node in self.analysis.outputs)


def _side_streams(streams: Sequence[Stream] | None) -> Iterator[Stream]:
    """Yield all streams except the first."""
    yield from () if streams is None else streams[1:]


def _on(streams: Sequence[Stream] | None, number: int) -> AbstractContextManager[Any]:
    return nullcontext() if streams is None else OnStream(streams[number])


# ---- parts that Inductor compiles as one, each on one stream without waits inside


def find_parts(analysis: ProgramAnalysis, branches: Branches) -> list[tuple[int, ...]]:
    """Return the parts in launch order; nodes that cannot be fused form parts of their own.

        stream 0   [ a  b ]───────────[ e  f ]      e waits for d, so it starts a part
        stream 1   [ c  d ]──────────┘              another stream waits for d, so d ends a part

    A part that draws random numbers is not compiled, because compiled code would draw others. A part that changes
    memory in place is compiled only if nothing outside can see it: the memory is made and used within the part, by one
    operation after the other. Compiled code may share memory where the model does not, and the other way round.
    """
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
