"""Cut rules: the positions where cuts may or must lie, from the graph and the user's requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PartitionError, UsageError, nearest
from penstock.model.graph import Graph

Group = str | Iterable[int | str]


@dataclass(frozen=True, eq=False)
class Places:
    """The positions where cuts may lie, and those where they must lie."""

    positions: NDArray[np.int64]  # where cuts may lie, and both ends of the graph
    forced: frozenset[int]  # indices of the positions that must have a cut


def find_places(graph: Graph, num_stages: int, cuts_at: Sequence[int | str], together: Sequence[Group]) -> Places:
    """Return where cuts may and must lie.

    Raises:
        UsageError: if the graph does not have a requested node or module.
        PartitionError: if the requests contradict each other or the graph.
    """
    cuts, groups = _checked(graph, cuts_at, together)
    num_nodes = len(graph.nodes)
    may = np.ones(num_nodes + 1, dtype=np.bool_)
    may[[c for c in graph.uncuttable if 0 <= c <= num_nodes]] = False
    for _, nodes in groups:
        may[min(nodes) + 1 : max(nodes) + 1] = False
    faults = [fault for cut in cuts for fault in _conflicts(graph, cut, groups)]
    inner = may[1:-1]
    if len(cuts) > num_stages - 1:
        faults.append(f"cuts: {len(cuts)} requested; {num_stages} stages have {num_stages - 1}")
    if inner.sum() < num_stages - 1:
        closed = len(inner) - int(inner.sum())
        why = f", {closed} more cannot be cut (changed in place, or listed in together=)" if closed else ""
        faults.append(
            f"{num_stages} stages need {num_stages - 1} cuts; nodes: {num_nodes}, places for a cut: "
            f"{int(inner.sum())}{why}; request fewer stages{'' if inner.any() else ': only lanes=1 is possible'}"
        )
    if faults:
        raise PartitionError("the requested cuts are impossible: " + "; ".join(faults))
    may[[0, num_nodes]] = True
    positions = np.flatnonzero(may)
    return Places(positions, frozenset(np.searchsorted(positions, sorted(cuts)).tolist()))


def _conflicts(graph: Graph, cut: int, groups: list[tuple[str, list[int]]]) -> list[str]:
    """Return the reasons that forbid a requested cut."""
    faults = [
        f"a cut at {cut} is requested, but {name} (nodes {min(nodes)} to {max(nodes)}) must be in one stage"
        for name, nodes in groups
        if min(nodes) < cut <= max(nodes)
    ]
    if cut in graph.uncuttable:
        module = graph.nodes[cut].module or "the model"
        faults.append(f"a cut at {cut} is requested, but values that cross there (in {module}) are changed in place")
    return faults


def _checked(
    graph: Graph, cuts_at: Sequence[int | str], together: Sequence[Group]
) -> tuple[list[int], list[tuple[str, list[int]]]]:
    """Return the cuts as numbers, and the groups as names and nodes."""
    faults: list[str] = []
    cuts: list[int] = []
    if isinstance(cuts_at, (str, int)) or isinstance(together, str):
        raise UsageError("cuts: pass a list of places; together: pass a list of groups")
    for place in cuts_at:
        nodes = _nodes(graph, place)
        if not nodes:
            faults.append(f"cuts: {_unknown(graph, place)}")
        elif not 0 < min(nodes) < len(graph.nodes):
            faults.append(f"cuts: a cut at {min(nodes)} leaves a stage without nodes; nodes: {len(graph.nodes)}")
        else:
            cuts.append(min(nodes))
    groups: list[tuple[str, list[int]]] = []
    for number, group in enumerate(together):
        members: list[int | str] = [group] if isinstance(group, (str, int)) else list(group)
        found = [(member, _nodes(graph, member)) for member in members]
        faults += [f"together: {_unknown(graph, member)}" for member, nodes in found if not nodes]
        if all(nodes for _, nodes in found) and found:
            name = repr(group) if isinstance(group, str) else f"group {number} of together"
            groups.append((name, [node for _, nodes in found for node in nodes]))
    if faults:
        raise UsageError("; ".join(faults))
    return sorted(set(cuts)), groups


def _nodes(graph: Graph, place: object) -> list[int]:
    """Return the nodes of a place: a node number, the name of a node or the path of a module."""
    if isinstance(place, str):
        inside = f"{place}."
        return [
            index
            for index, node in enumerate(graph.nodes)
            if place in (node.name, node.module) or node.module.startswith(inside)
        ]
    if isinstance(place, (int, np.integer)) and not isinstance(place, bool) and 0 <= place < len(graph.nodes):
        return [int(place)]
    return []


def _unknown(graph: Graph, place: object) -> str:
    if not isinstance(place, str):
        return f"there is no node {place!r}; nodes: {len(graph.nodes)}"
    names = {node.name for node in graph.nodes} | {node.module for node in graph.nodes if node.module}
    return f"there is no node or module {place!r}.{nearest(place, names)}"
