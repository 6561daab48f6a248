"""Profile: the seconds and bytes that each node of a graph takes for one micro-batch, as pure data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import CostError
from penstock.files import write_whole
from penstock.model.costs import Costs
from penstock.model.graph import Graph

Floats = NDArray[np.float64]

_COLUMNS = ("forward", "input_grad", "weight_grad", "saved_bytes", "pending_bytes")
_PLAIN = ("batch_size", "optimizer_bytes", "device", "method", *_COLUMNS)
_FORMAT = "penstock profile 1"


@dataclass(frozen=True, eq=False)
class Profile:
    """The costs of each node of a graph; every array has one number per node.

    Attributes:
        graph: the graph of these nodes.
        batch_size: the number of samples in the measured micro-batch.
        forward: the seconds of the forward.
        input_grad: the seconds of the gradient of the inputs.
        weight_grad: the seconds of the gradient of the parameters.
        saved_bytes: the memory that the forward keeps for the backward.
        pending_bytes: the memory that the input gradient keeps for the weight gradient.
        optimizer_bytes: the bytes of optimizer state per byte of a trainable parameter (2.0 for Adam in the same
            precision).
        device: a description of the measured device.
        method: "measured" or "analytic".
    """

    graph: Graph
    batch_size: int
    forward: Floats
    input_grad: Floats
    weight_grad: Floats
    saved_bytes: Floats
    pending_bytes: Floats
    optimizer_bytes: float = 2.0
    device: str = ""
    method: str = "measured"

    def __post_init__(self) -> None:
        faults = []
        for name in _COLUMNS:
            try:
                column = np.array(getattr(self, name), dtype=np.float64)
            except (TypeError, ValueError):
                faults.append(f"{name}: pass one number per node")
                continue
            column.flags.writeable = False
            object.__setattr__(self, name, column)
            faults += _column_faults(name, column, self.graph)
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, (int, np.integer)):
            faults.append(f"batch_size: {self.batch_size!r} is not a whole number")
        elif self.batch_size < 1:
            faults.append(f"batch_size: {self.batch_size} must be at least 1")
        if isinstance(self.optimizer_bytes, bool) or not isinstance(self.optimizer_bytes, (int, float, np.number)):
            faults.append(f"optimizer_bytes: {self.optimizer_bytes!r} is not a number")
        elif not 0 <= self.optimizer_bytes < float("inf"):
            faults.append(f"optimizer_bytes: {self.optimizer_bytes} must be finite and not negative")
        if faults:
            raise CostError("; ".join(faults))

    @cached_property
    def crossing_bytes(self) -> Floats:
        """The bytes that cross each cut in the forward, from 0 to the number of nodes."""
        return np.array(self.graph.crossing_bytes(self.batch_size), dtype=np.float64)

    @cached_property
    def crossing_grad_bytes(self) -> Floats:
        """The bytes of gradients that cross each cut in the backward; only values with a gradient count."""
        return np.array(self.graph.crossing_bytes(self.batch_size, of_gradients=True), dtype=np.float64)

    def costs(self, cuts: Sequence[int]) -> Costs:
        """Return the costs of the stages between cuts, for `simulate` and the schedules.

        Raises:
            GraphError: if the graph cannot be cut there.
        """
        self.graph.check_cuts(cuts)
        ends = [0, *cuts, len(self.graph.nodes)]

        def sums(column: Floats) -> list[float]:
            return [float(column[a:b].sum()) for a, b in pairwise(ends)]

        input_grad, weight_grad = sums(self.input_grad), sums(self.weight_grad)
        return Costs(
            forward=sums(self.forward),
            backward=[i + w for i, w in zip(input_grad, weight_grad, strict=True)],
            input_grad=input_grad,
            weight_grad=weight_grad,
            saved_bytes=sums(self.saved_bytes),
            pending_bytes=sums(self.pending_bytes),
            output_bytes=[*(float(self.crossing_bytes[c]) for c in cuts), 0.0],
            input_bytes=[0.0, *(float(self.crossing_bytes[c]) for c in cuts)],
        )

    def weight_bytes(self, nodes: Iterable[int]) -> float:
        """Return the bytes of the parameters and buffers that these nodes use, each once."""
        return float(sum(self.graph.parameters[name].num_bytes for name in self.graph.parameters_of(nodes)))

    def grad_bytes(self, nodes: Iterable[int]) -> float:
        """Return the bytes of the gradients of the trainable parameters that these nodes use."""
        used = (self.graph.parameters[name] for name in self.graph.parameters_of(nodes))
        return float(sum(parameter.num_bytes for parameter in used if parameter.is_trainable))

    def state_bytes(self, nodes: Iterable[int]) -> float:
        """Return the bytes of the weights, gradients and optimizer state of these nodes."""
        chosen = list(nodes)
        return self.weight_bytes(chosen) + (1 + self.optimizer_bytes) * self.grad_bytes(chosen)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile, without the graph, as JSON; a failed write leaves no partial file.

        Raises:
            OutputError: if the file cannot be written.
        """
        content = {"format": _FORMAT, "graph": _fingerprint(self.graph), **self.to_plain()}
        write_whole(path, json.dumps(content, indent=1) + "\n")

    def to_plain(self) -> dict[str, Any]:
        """Return everything except the graph as JSON-compatible data."""
        return {
            "batch_size": int(self.batch_size),
            "optimizer_bytes": float(self.optimizer_bytes),
            "device": self.device,
            "method": self.method,
            **{name: getattr(self, name).tolist() for name in _COLUMNS},
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], graph: Graph) -> Profile:
        """Return the profile of a graph from the data of `to_plain`."""
        return cls(graph=graph, **{name: plain[name] for name in _PLAIN})

    @classmethod
    def load(cls, path: str | PathLike[str], graph: Graph) -> Profile:
        """Read a profile that was saved for the same graph.

        Raises:
            CostError: if the file cannot be read, is not a profile, or belongs to another graph.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CostError(f"{path!s}: cannot be read as a profile: {error}") from error
        wanted = {"graph", *_PLAIN}
        if not isinstance(content, dict) or content.get("format") != _FORMAT or not wanted <= set(content):
            raise CostError(f"{path!s}: is not a profile of this version of Penstock")
        if content["graph"] != _fingerprint(graph):
            raise CostError(
                f"{path!s}: was measured for another graph; nodes there: {len(content['forward'])}, "
                f"here: {len(graph.nodes)}; profile the model again"
            )
        return cls.from_plain(content, graph)


def _column_faults(name: str, column: Floats, graph: Graph) -> list[str]:
    if column.shape != (len(graph.nodes),):
        return [f"{name}: pass one number per node ({len(graph.nodes)} nodes); given: {column.size}"]
    wrong = np.flatnonzero(~(np.isfinite(column) & (column >= 0)))
    if not wrong.size:
        return []
    node = int(wrong[0])
    more = f" (and {wrong.size - 1} more)" if wrong.size > 1 else ""
    return [f"{name} of node {graph.nodes[node].name}: {column[node]} must be finite and not negative{more}"]


def _fingerprint(graph: Graph) -> str:
    """Return a hash of the nodes of a graph and their connections."""
    text = json.dumps([[n.name, n.op, n.inputs, n.outputs, n.parameters] for n in graph.nodes])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
