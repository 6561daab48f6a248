"""Wiring: which value goes from which stage to which, derived from the inputs and outputs of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.errors import GraphError

if TYPE_CHECKING:
    from penstock.model.stages import Stage

_GIVEN = "input:"  # the names of the model's inputs begin with it


@dataclass(frozen=True)
class Edge:
    """The values that one stage sends to another; `places` are their indices in the outputs of the source.

    With `has_rest`, the edge also carries the outputs of the source that have no names.
    """

    source: int
    target: int
    names: tuple[str, ...]
    places: tuple[int, ...]
    has_rest: bool = False


@dataclass(frozen=True)
class Feed:
    """The origin of one input of a stage: an input of the model (by name), or a place in the values of an edge."""

    given: str = ""
    source: int = -1
    place: int = -1


@dataclass(frozen=True)
class Wiring:
    """The edges between stages in one mode, and the origin of each input and result."""

    edges: tuple[Edge, ...]  # one edge for each pair of stages that exchange values
    feeds: tuple[tuple[Feed, ...], ...]  # for each stage, the origin of each of its inputs
    # the origin of each result of the model; if its source is the last stage, it is an output of this stage
    results: tuple[Feed, ...]

    @cached_property
    def into(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage, the edges that end at it; the nearest source comes first."""
        return tuple(tuple(edge for edge in self.edges if edge.target == stage) for stage in range(len(self.feeds)))

    @cached_property
    def out_of(self) -> tuple[tuple[Edge, ...], ...]:
        """For each stage, the edges that start at it."""
        return tuple(tuple(edge for edge in self.edges if edge.source == stage) for stage in range(len(self.feeds)))

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The edges that skip stages."""
        return tuple((e.source, e.target) for e in self.edges if e.target - e.source > 1)


def wire(stages: Sequence[Stage], results: Sequence[str], *, has_rest: bool = False) -> Wiring:
    """Return the wiring of some stages.

    Args:
        stages: the stages in order.
        results: the names of the model's results; those that an earlier stage makes are sent to the last stage.
        has_rest: whether stages also make values without names, which go to the next stage only.
    """
    maker_of: dict[str, int] = {}
    wanted: list[dict[str, int]] = [{} for _ in stages]  # for each stage: name -> maker
    last = len(stages) - 1
    for index, stage in enumerate(stages):
        for name in stage.inputs:
            if not name.startswith(_GIVEN):
                wanted[index][name] = _maker(maker_of, name, index)
        maker_of.update(dict.fromkeys(stage.outputs, index))
    for name in results:
        if not name.startswith(_GIVEN) and (maker := _maker(maker_of, name, last)) != last:
            wanted[last].setdefault(name, maker)
    edges: dict[tuple[int, int], Edge] = {}
    for target, names in enumerate(wanted):
        for source in sorted(set(names.values()) | ({target - 1} if has_rest and target else set()), reverse=True):
            carried = tuple(name for name, maker in names.items() if maker == source)
            places = tuple(stages[source].outputs.index(name) for name in carried)
            edges[source, target] = Edge(source, target, carried, places, has_rest and source == target - 1)

    def feed(name: str, stage: int) -> Feed:
        if name.startswith(_GIVEN):
            return Feed(given=name.removeprefix(_GIVEN))
        source = wanted[stage].get(name, stage)
        if source == stage:  # a result that the last stage makes itself
            return Feed(source=stage, place=stages[stage].outputs.index(name))
        return Feed(source=source, place=edges[source, stage].names.index(name))

    return Wiring(
        edges=tuple(edges.values()),
        feeds=tuple(tuple(feed(name, index) for name in stage.inputs) for index, stage in enumerate(stages)),
        results=tuple(feed(name, last) for name in results),
    )


def _maker(maker_of: dict[str, int], name: str, user: int) -> int:
    if name not in maker_of:
        raise GraphError(f"stage {user} needs {name}, which no earlier stage makes")
    return maker_of[name]
