"""Critical chains: the longest chains through the graph of waits between actions, in integer units of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from graphlib import TopologicalSorter

Wait = tuple[int, int, int]  # maker, user, lag


class Chains:
    """A graph of nodes and the waits between them."""

    def __init__(self, durations: Sequence[int], waits: Iterable[Wait]) -> None:
        self.durations = durations
        self.before: list[list[tuple[int, int]]] = [[] for _ in durations]  # (maker, lag) of each node
        self.after: list[list[tuple[int, int]]] = [[] for _ in durations]  # (user, lag)
        for maker, user, lag in waits:
            self.before[user].append((maker, lag))
            self.after[maker].append((user, lag))
        graph = {user: [maker for maker, _ in makers] for user, makers in enumerate(self.before)}
        self.sorted = list(TopologicalSorter(graph).static_order())  # raises CycleError

    @cached_property
    def heads(self) -> list[int]:
        """For each node, the length of the longest chain that must end before its start."""
        heads = [0] * len(self.durations)
        for node in self.sorted:
            heads[node] = max((heads[m] + self.durations[m] + lag for m, lag in self.before[node]), default=0)
        return heads

    @cached_property
    def tails(self) -> list[int]:
        """For each node, the length of the longest chain that must follow its end."""
        tails = [0] * len(self.durations)
        for node in reversed(self.sorted):
            tails[node] = max((lag + self.durations[u] + tails[u] for u, lag in self.after[node]), default=0)
        return tails

    def outermost(self, lane: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the nodes that no chain from their own lane reaches, and those whose chains never return to it."""
        earlier, later = [0] * len(lane), [0] * len(lane)  # lanes as bits
        for node in self.sorted:
            for maker, _ in self.before[node]:
                earlier[node] |= earlier[maker] | 1 << lane[maker]
        for node in reversed(self.sorted):
            for user, _ in self.after[node]:
                later[node] |= later[user] | 1 << lane[user]
        nodes = range(len(lane))
        return [n for n in nodes if not earlier[n] >> lane[n] & 1], [n for n in nodes if not later[n] >> lane[n] & 1]
