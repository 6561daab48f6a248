"""Mode matching: cut the graph of the other mode so that each parameter stays on its stage."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.model.graph import Graph


def held_by_stage(graph: Graph, cuts: Sequence[int]) -> list[tuple[str, ...]]:
    """Return the parameters and buffers that each stage holds: those that it uses, and a share of the unused ones.

    Every tensor must be on some stage. An unused one goes with the one before it in the order of the model.
    """
    held = [dict.fromkeys(graph.parameters_of(nodes)) for nodes in graph.stages(cuts)]
    last_stage_of = {name: stage for stage, names in enumerate(held) for name in names}
    now = 0
    for name in graph.parameters:
        now = last_stage_of.get(name, now)
        if name not in last_stage_of:
            held[now][name] = None
    return [tuple(names) for names in held]


def match_cuts(graph: Graph, cuts: Sequence[int], other: Graph) -> tuple[int, ...]:
    """Return cuts of another graph of the same model, so that its nodes lie on the stages of the parameters they use.

    The cut keeps its distance, in nodes, from the last node with parameters before it.
    """
    found: list[int] = []
    for number, cut in enumerate(cuts):
        before = _last_with_parameters(graph, cut)
        distance = cut - 1 - before
        at = _same_use(graph, before, other) + 1 + distance if before >= 0 else cut
        limit = _first_with_parameters(graph, cut)
        most = _same_use(graph, limit, other) if limit < len(graph.nodes) else len(other.nodes) - 1
        lowest = (found[-1] if found else 0) + 1
        highest = len(other.nodes) - (len(cuts) - number)
        at = min(max(min(at, most), lowest), highest)
        while at in other.uncuttable and at < highest:
            at += 1
        found.append(at)
    return tuple(found)


def _last_with_parameters(graph: Graph, cut: int) -> int:
    return next((index for index in range(cut - 1, -1, -1) if graph.nodes[index].parameters), -1)


def _first_with_parameters(graph: Graph, cut: int) -> int:
    return next((index for index in range(cut, len(graph.nodes)) if graph.nodes[index].parameters), len(graph.nodes))


def _same_use(graph: Graph, index: int, other: Graph) -> int:
    """Return the node of the other graph that is the same use (first, second, ...) of the same parameters."""
    names = graph.nodes[index].parameters
    count = sum(node.parameters == names for node in graph.nodes[:index])
    alike = [i for i, node in enumerate(other.nodes) if node.parameters == names]
    if not alike:
        alike = [i for i, node in enumerate(other.nodes) if set(node.parameters) & set(names)]
    if not alike:
        return round(index * len(other.nodes) / len(graph.nodes))
    return alike[min(count, len(alike) - 1)]
