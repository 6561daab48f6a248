"""Branches: which parts of a model's graph run in parallel, the stream of each node, and the waits between streams.

A branch is a path through the graph. The longest path gets the first stream. The longest path of the remaining nodes
gets another stream, if it is long enough and a simulation of all streams shows that the whole gets faster; and so on.
Nodes on no such path, such as the keys and values of an attention or a mask, run on the stream that uses them. Nodes
are launched in the order of the model, so the streams and the waits alone keep the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import GraphError

MOST_BRANCHES = 8
_MOST_PATHS = 64  # paths to try, longest first
_LEAST_KERNELS = 8  # on a path with its own stream: shorter paths cost more in waits than they save
_LEAST_GAIN = 0.25  # share of a path's time that must be saved
_SWITCH_SECONDS = 2e-6  # from a kernel's end to the start of a waiting kernel on another stream


@dataclass(frozen=True)
class GraphNode:
    """A node of the graph as plain data."""

    name: str
    after: tuple[int, ...] = ()  # the indices of the nodes that must finish before it
    seconds: float = 0.0  # its estimated time; 0 if it needs no kernel, as a view


@dataclass(frozen=True)
class Branches:
    """The stream of each node, and what follows from that.

    >>> towers = [GraphNode("a"), GraphNode("b", (0,), 3e-6), GraphNode("c", (), 5e-6), GraphNode("d", (1, 2), 1e-6)]
    >>> Branches(tuple(towers), (0, 0, 1, 0)).waits
    ((), (), (), (2,))
    """

    nodes: tuple[GraphNode, ...]  # the nodes in launch order
    stream_of: tuple[int, ...]  # the stream of each node, numbered from 0

    def __post_init__(self) -> None:
        faults = [
            f"{node.name} depends on a node that does not come before it"
            for index, node in enumerate(self.nodes)
            if any(not 0 <= before < index for before in node.after)
        ]
        if len(self.stream_of) != len(self.nodes):
            faults.append(f"nodes: {len(self.nodes)}, but streams are given for {len(self.stream_of)}")
        if set(self.stream_of) != set(range(max(self.stream_of, default=-1) + 1)):
            faults.append(f"streams are not numbered from 0 without a gap: {sorted(set(self.stream_of))}")
        if faults:
            raise GraphError("; ".join(faults[:5]))

    @property
    def num_streams(self) -> int:
        """The number of streams, at least one."""
        return max(self.stream_of, default=0) + 1

    @cached_property
    def crossing(self) -> frozenset[int]:
        """The nodes that a node on another stream depends on."""
        return frozenset(
            before
            for index, node in enumerate(self.nodes)
            for before in node.after
            if self.stream_of[before] != self.stream_of[index]
        )

    @cached_property
    def waits(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the nodes on other streams to wait for, without those that its stream already waited for."""
        # for each stream, how far it has waited for others
        seen = [[-1] * self.num_streams for _ in range(self.num_streams)]
        seen_at: dict[int, tuple[int, ...]] = {}
        found: list[tuple[int, ...]] = []
        for index, node in enumerate(self.nodes):
            stream, waits = self.stream_of[index], []
            own = seen[stream]
            for before in sorted(node.after, reverse=True):  # the latest first: it may include the others
                if self.stream_of[before] != stream and own[self.stream_of[before]] < before:
                    waits.append(before)
                    own[:] = map(max, own, seen_at[before])
            own[stream] = index
            if index in self.crossing:
                seen_at[index] = tuple(own)
            found.append(tuple(waits))
        return tuple(found)

    @cached_property
    def awaited(self) -> frozenset[int]:
        """The nodes that another stream waits for."""
        return frozenset(before for waits in self.waits for before in waits)

    @cached_property
    def ends(self) -> tuple[float, ...]:
        """The estimated end of each node, if streams do not slow each other down."""
        free = [0.0] + [_SWITCH_SECONDS] * (self.num_streams - 1)
        found: list[float] = []
        for node, stream in zip(self.nodes, self.stream_of, strict=True):
            ready = [found[a] + _SWITCH_SECONDS * (self.stream_of[a] != stream) for a in node.after]
            free[stream] = max([free[stream], *ready]) + node.seconds
            found.append(free[stream])
        return tuple(found)

    @cached_property
    def seconds(self) -> float:
        """The estimated time of the whole."""
        joined = [end + _SWITCH_SECONDS * (s > 0) for end, s in zip(self.ends, self.stream_of, strict=True)]
        return max(joined, default=0.0)

    @property
    def total_seconds(self) -> float:
        """The estimated time without parallel streams."""
        return sum(node.seconds for node in self.nodes)

    def to_text(self) -> str:
        """Return a table with the nodes, the kernels and the share of the work of each branch."""
        lines = ["branch  nodes  kernels  share of the work"]
        for stream in range(self.num_streams):
            own = [node for node, at in zip(self.nodes, self.stream_of, strict=True) if at == stream]
            share = sum(node.seconds for node in own) / self.total_seconds if self.total_seconds else 0.0
            lines.append(f"{stream:<6}  {len(own):>5}  {sum(node.seconds > 0 for node in own):>7}  {share:>17.0%}")
        return "\n".join(lines)


def find_branches(nodes: Sequence[GraphNode], *, most: int = MOST_BRANCHES) -> Branches:
    """Return the branches of a graph on at most `most` streams; each node must come after those that it needs."""
    all_nodes = tuple(nodes)
    found = Branches(all_nodes, (0,) * len(all_nodes))
    if most == 1 or not all_nodes:
        return found
    paths = _long_paths(all_nodes)
    chosen = dict.fromkeys(paths[0], 0) if paths else {}
    for path in paths[1:]:
        used = found.num_streams
        trials = [chosen | dict.fromkeys(path, stream) for stream in range(1, min(used + 1, most))]
        results = [Branches(all_nodes, _spread(all_nodes, trial)) for trial in trials]
        # even if another stream takes longest, earlier ends still count
        best = min(range(len(trials)), key=lambda at: (results[at].seconds, sum(results[at].ends)))
        if found.seconds - results[best].seconds >= _LEAST_GAIN * sum(all_nodes[index].seconds for index in path):
            found, chosen = results[best], trials[best]
    return found


def _long_paths(nodes: Sequence[GraphNode]) -> list[list[int]]:
    """Return disjoint paths through the graph that are worth a stream, the longest first."""
    is_left = [True] * len(nodes)
    paths: list[list[int]] = []
    while len(paths) < _MOST_PATHS:
        path = _longest(nodes, is_left)
        if sum(nodes[index].seconds > 0 for index in path) < _LEAST_KERNELS:
            break
        for index in path:
            is_left[index] = False
        paths.append(path)
    return paths


def _longest(nodes: Sequence[GraphNode], is_left: Sequence[bool]) -> list[int]:
    """Return the longest path through the remaining nodes."""
    length = [0.0] * len(nodes)
    came_from: list[int | None] = [None] * len(nodes)
    for index, node in enumerate(nodes):
        if is_left[index]:
            before = max((a for a in node.after if is_left[a]), key=length.__getitem__, default=None)
            came_from[index] = before
            length[index] = node.seconds + (0.0 if before is None else length[before])
    at: int | None = max((i for i in range(len(nodes)) if is_left[i]), key=length.__getitem__, default=None)
    path: list[int] = []
    while at is not None:
        path.append(at)
        at = came_from[at]
    return path[::-1]


def _spread(nodes: Sequence[GraphNode], chosen: Mapping[int, int]) -> tuple[int, ...]:
    """Return the stream of every node: a node on no path runs where it is used, or else where its inputs were made."""
    stream_of: list[int | None] = [chosen.get(index) for index in range(len(nodes))]
    users: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for before in node.after:
            users[before].append(index)
    for index in reversed(range(len(nodes))):
        if stream_of[index] is None:
            wanted = Counter(stream for user in users[index] if (stream := stream_of[user]) is not None)
            stream_of[index] = min(wanted, key=lambda s: (-wanted[s], s), default=None)
    found: list[int] = []
    for index, node in enumerate(nodes):
        known = stream_of[index]
        found.append(known if known is not None else found[max(node.after)] if node.after else 0)
    return tuple(found)
