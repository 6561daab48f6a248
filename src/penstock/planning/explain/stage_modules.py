"""Stage modules: a short name for the modules that a run of nodes covers: `transformer.{wte, h.0–5}, lm_head`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.model.graph import Graph

_MOST_PARTS = 6  # maximum length of the list of modules when a module is replaced by its children
_MOST_INNER = 3  # the same, for the children of a member of a list of modules
_PART = " (part)"


@dataclass
class _Branch:
    """A module in the tree of modules, with the number of its nodes in the graph and in the stage."""

    path: str
    num_nodes: int = 0
    num_here: int = 0
    first: int = -1  # the stage's first node in it
    children: dict[str, _Branch] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.num_here == self.num_nodes

    @property
    def here(self) -> list[_Branch]:
        """The children that have nodes in the stage, in the order of these nodes."""
        return sorted((child for child in self.children.values() if child.num_here), key=lambda child: child.first)

    @property
    def has_list(self) -> bool:
        """Whether it contains a list of modules, such as the layers of a model."""
        return any(name.isdigit() or child.has_list for name, child in self.children.items())


def module_parts(graph: Graph, nodes: range) -> tuple[str, ...]:
    """Return the paths of the modules that the nodes cover, in the order they run; "(part)" marks a module that is cut.

    The largest modules that are completely in the stage are named. A module that is cut is replaced by its children
    while the list stays short, down to a member of the innermost list of modules.
    """
    root = _tree(graph, nodes)
    if root.is_whole:
        return ("the whole model",)
    parts = [root]
    while True:
        finer = [part for part in parts if not part.is_whole and part.here and (part.has_list or len(parts) == 1)]
        for part in sorted(finer, key=lambda part: -part.num_here):
            at = parts.index(part)
            longer = [*parts[:at], *part.here, *parts[at + 1 :]]
            most = _MOST_INNER if part.path.rpartition(".")[2].isdigit() else _MOST_PARTS
            if len(_merged(_named(longer))) <= most or part is root:
                parts = longer
                break
        else:
            return tuple(_named(sorted(parts, key=lambda part: part.first)))


def _tree(graph: Graph, nodes: range) -> _Branch:
    root = _Branch("")
    for index, node in enumerate(graph.nodes):
        branch = root
        for name in ["", *node.module.split(".")] if node.module else [""]:
            if name:
                path = f"{branch.path}.{name}" if branch.path else name
                branch = branch.children.setdefault(name, _Branch(path))
            branch.num_nodes += 1
            if index in nodes:
                branch.num_here += 1
                branch.first = index if branch.first < 0 else branch.first
    return root


def _named(parts: Iterable[_Branch]) -> list[str]:
    return [(part.path or "the model") + ("" if part.is_whole else _PART) for part in parts]


def _merged(names: Sequence[str]) -> list[str]:
    """Write numbered neighbours as one: h.0, h.1, h.2 as h.0–2."""
    merged: list[str] = []
    last: tuple[str, int, int] | None = None  # of the current run: its stem, first and last number
    for name in names:
        found = re.fullmatch(r"(.*?)(\d+)", name)
        if found and last and last[0] == found[1] and int(found[2]) == last[2] + 1:
            last = (last[0], last[1], int(found[2]))
            merged[-1] = f"{last[0]}{last[1]}–{last[2]}"
        else:
            last = (found[1], int(found[2]), int(found[2])) if found else None
            merged.append(name)
    return merged


def shorten(parts: Sequence[str]) -> str:
    """Return module paths as a short text: merge runs of numbers, and write shared prefixes once.

    >>> shorten(["net.wte", "net.h.0", "net.h.1", "net.h.2 (part)", "head"])
    'net.{wte, h.0–1, h.2 (part)}, head'
    """
    groups: list[list[list[str]]] = []
    for name in _merged(parts):
        path = name.split(".")
        if groups and groups[-1][-1][0] == path[0] and min(len(path), len(groups[-1][-1])) > 1:
            groups[-1].append(path)
        else:
            groups.append([path])
    return ", ".join(_grouped(paths) for paths in groups)


def _grouped(paths: list[list[str]]) -> str:
    if len(paths) == 1:
        return ".".join(paths[0])
    shared = 0
    while len({tuple(path[: shared + 1]) for path in paths}) == 1 and all(len(path) > shared + 1 for path in paths):
        shared += 1
    return ".".join(paths[0][:shared]) + ".{" + ", ".join(".".join(path[shared:]) for path in paths) + "}"
