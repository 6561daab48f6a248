"""Interpreter: runs a program piece by piece, each on its stream; on a CPU simply one after the other.

    stream 0   ─(1)── a ─── b ──────── e ─(3)──    (1) a side stream begins behind what stream 0 has been given
                 │                  (2)    │       (2) where a value crosses, its user waits for it: e for d
    stream 1     └─── c ─── d ────── ┴ ────┘       (3) stream 0 ends behind all the others

Within a capture all of this becomes edges of one CUDA graph, which a replay launches as a whole. A piece is one
operation, or several that Inductor compiles as one.
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
from penstock.infer.graph.node_execution import compute
from penstock.infer.graph.program_analysis import Reading

__all__ = ["Interpreter"]

Known = dict[fx.Node, Any]


@dataclass(frozen=True)
class _Step:
    """One piece.

    Attributes:
        last: the place of its last node among all.
        made: the nodes whose values it makes known.
        compute: from what is known to these values.
        waits: the nodes of other streams to wait for.
        is_awaited: another stream waits for its last node.
        crossing: those of its values that are used on another stream.
        last_used: nodes whose values nobody uses from here on.
    """

    last: int
    made: tuple[fx.Node, ...]
    compute: Callable[[Known], Sequence[Any]]
    waits: tuple[int, ...]
    is_awaited: bool
    crossing: tuple[fx.Node, ...]
    last_used: tuple[fx.Node, ...]


class Interpreter:
    """Runs a program on as many streams as it has branches.

    Args:
        reading: the program.
        branches: the stream of each of its nodes.
        options: of Inductor, to compile as few pieces as can be, for the shapes of the first run; None: one operation
            after the other.
    """

    def __init__(self, reading: Reading, branches: Branches, *, options: Options | None = None) -> None:
        self.reading, self.branches, self._options = reading, branches, options
        parts = (
            find_parts(reading, branches) if options is not None else [(index,) for index in range(len(reading.nodes))]
        )
        steps = self._steps(parts)
        self._runs = [(stream, list(run)) for stream, run in groupby(steps, lambda step: branches.stream_of[step.last])]

    def _steps(self, parts: Sequence[tuple[int, ...]]) -> list[_Step]:
        reading, branches = self.reading, self.branches
        nodes_of = [[reading.nodes[index] for index in part] for part in parts]
        users: dict[fx.Node, set[int]] = {}  # the pieces that make or use a value
        for at, nodes in enumerate(nodes_of):
            for node in nodes:
                for value in (node, *node.all_input_nodes):
                    users.setdefault(value, set()).add(at)
        stays = {*reading.outputs, *reading.arguments, *reading.once}
        is_known = {node for node, used in users.items() if len(used) > 1 or node in stays}
        last_used: dict[int, list[fx.Node]] = {}
        made_by = [tuple(node for node in nodes if len(nodes) == 1 or node in is_known) for nodes in nodes_of]
        for node in (node for made in made_by for node in made):
            if node not in stays:
                last_used.setdefault(max(users[node]), []).append(node)
        place_of = {node: index for index, node in enumerate(reading.nodes)}
        return [
            _Step(
                part[-1],
                made,
                self._computing(nodes_of[at], made),
                waits=branches.waits[part[0]],
                is_awaited=part[-1] in branches.awaited,
                crossing=tuple(node for node in made if place_of[node] in branches.crossing),
                last_used=tuple(last_used.get(at, ())),
            )
            for at, (part, made) in enumerate(zip(parts, made_by, strict=True))
        ]

    def _computing(self, nodes: Sequence[fx.Node], made: Sequence[fx.Node]) -> Callable[[Known], Sequence[Any]]:
        if len(nodes) > 1:
            assert self._options is not None
            return compiled_part(nodes, made, self.reading, self._options)
        (node,), root = nodes, self.reading.root
        return lambda known: (compute(node, known, root),)

    def make_once(self, arguments: Sequence[Any]) -> Known:
        """Compute what is the same in every call with inputs of these shapes."""
        known: Known = dict(zip(self.reading.arguments, arguments, strict=True))
        for node in self.reading.once:
            known[node] = compute(node, known, self.reading.root)
        return {node: known[node] for node in self.reading.once}

    def run(
        self, arguments: Sequence[Any], once: Mapping[fx.Node, Any], streams: Sequence[Stream] | None = None
    ) -> tuple[Any, ...]:
        """Compute the outputs.

        Args:
            arguments: what is held, the inputs, the batch size.
            once: what `make_once` made.
            streams: one for each branch, the first of which is the current one; None on a CPU.
        """
        known: Known = {**dict(zip(self.reading.arguments, arguments, strict=True)), **once}
        # The allocator gives memory of a stream again to the same stream, once nobody holds it. It knows nothing of
        # other streams that may still read it: so what crosses is held until no more memory is asked for.
        crossed: list[Any] = []
        events: dict[int, Event] = {}
        for stream in _sides(streams):  # (1)
            stream.wait_stream(streams[0])  # type: ignore[index]  # there are sides only where there are streams
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
        for stream in _sides(streams):  # (3)
            streams[0].wait_stream(stream)  # type: ignore[index]
        return tuple(known[node] for node in self.reading.outputs)


def _sides(streams: Sequence[Stream] | None) -> Iterator[Stream]:
    """Yield the streams beside the first."""
    yield from () if streams is None else streams[1:]


def _on(streams: Sequence[Stream] | None, number: int) -> AbstractContextManager[Any]:
    return nullcontext() if streams is None else OnStream(streams[number])
