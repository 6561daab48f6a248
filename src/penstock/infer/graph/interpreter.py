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
from itertools import groupby
from typing import Any

from torch import fx

from penstock.compile.options import Options
from penstock.devices.cuda_streams import Event, OnStream, Stream
from penstock.infer.graph.branches import Branches
from penstock.infer.graph.compiled_parts import compiled_part, find_parts
from penstock.infer.graph.program_analysis import ProgramAnalysis, compute

Known = dict[fx.Node, Any]


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
