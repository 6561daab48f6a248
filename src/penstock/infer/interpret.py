"""Interpreter: runs a program operation by operation, each on its stream; on a CPU simply one after the other.

    stream 0   ─(1)── a ─── b ──────── e ─(3)──    (1) a side stream begins behind what stream 0 has been given
                 │                  (2)    │       (2) where a value crosses, its user waits for it: e for d
    stream 1     └─── c ─── d ────── ┴ ────┘       (3) stream 0 ends behind all the others

Within a capture all of this becomes edges of one CUDA graph, which a replay launches as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import fx

from penstock.infer.branches import Branches
from penstock.infer.reading import Reading, compute

__all__ = ["Interpreter"]

Known = dict[fx.Node, Any]


@dataclass(frozen=True)
class _Step:
    """One operation.

    Attributes:
        index: its place among the nodes.
        node: what to compute.
        waits: the nodes of other streams to wait for.
        is_awaited: another stream waits for it.
        crosses: its value is used on another stream.
        last_used: nodes whose values nobody uses from here on.
    """

    index: int
    node: fx.Node
    waits: tuple[int, ...]
    is_awaited: bool
    crosses: bool
    last_used: tuple[fx.Node, ...]


class Interpreter:
    """Runs a program on as many streams as it has branches."""

    def __init__(self, reading: Reading, branches: Branches) -> None:
        self.reading, self.branches = reading, branches
        steps = self._steps()
        self._runs = [
            (stream, list(run)) for stream, run in groupby(steps, lambda step: branches.stream_of[step.index])
        ]

    def _steps(self) -> list[_Step]:
        reading, branches = self.reading, self.branches
        last_of = {a: index for index, node in enumerate(reading.nodes) for a in (node, *node.all_input_nodes)}
        stays = {*reading.outputs, *reading.arguments, *reading.once}
        last_used: dict[int, list[fx.Node]] = {}
        for node, index in last_of.items():
            if node not in stays and node.op != "get_attr":
                last_used.setdefault(index, []).append(node)
        return [
            _Step(
                index,
                node,
                waits=branches.waits[index],
                is_awaited=index in branches.awaited,
                crosses=index in branches.crossing,
                last_used=tuple(last_used.get(index, ())),
            )
            for index, node in enumerate(reading.nodes)
        ]

    def make_once(self, arguments: Sequence[Any]) -> Known:
        """Compute what is the same in every call with inputs of these shapes."""
        known: Known = dict(zip(self.reading.arguments, arguments, strict=True))
        for node in self.reading.once:
            known[node] = compute(node, known, self.reading.root)
        return {node: known[node] for node in self.reading.once}

    def run(
        self, arguments: Sequence[Any], once: Mapping[fx.Node, Any], streams: Sequence[torch.cuda.Stream] | None = None
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
        events: dict[int, torch.cuda.Event] = {}
        for stream in _sides(streams):  # (1)
            stream.wait_stream(streams[0])  # type: ignore[index]  # there are sides only where there are streams
        for number, steps in self._runs:
            with _on(streams, number):
                for step in steps:
                    for before in step.waits if streams is not None else ():  # (2)
                        streams[number].wait_event(events[before])  # type: ignore[index]
                    known[step.node] = compute(step.node, known, self.reading.root)
                    if step.is_awaited and streams is not None:
                        events[step.index] = streams[number].record_event()
                    if step.crosses:
                        crossed.append(known[step.node])
                    for node in step.last_used:
                        del known[node]
        for stream in _sides(streams):  # (3)
            streams[0].wait_stream(stream)  # type: ignore[index]
        return tuple(known[node] for node in self.reading.outputs)


def _sides(streams: Sequence[torch.cuda.Stream] | None) -> Iterator[torch.cuda.Stream]:
    """Yield the streams beside the first."""
    yield from () if streams is None else streams[1:]


def _on(streams: Sequence[torch.cuda.Stream] | None, number: int) -> AbstractContextManager[Any]:
    return nullcontext() if streams is None else torch.cuda.stream(streams[number])
