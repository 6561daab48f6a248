"""Survey: visit a captured model once and examine each kind of node once; the model is left unchanged."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.weak import WeakIdKeyDictionary

from penstock.devices import cuda
from penstock.errors import GraphError, PenstockError, UsageError, in_short, warn_user
from penstock.model.graph import Graph, Node
from penstock.model.parameters import held_tensors
from penstock.model.profile import Profile
from penstock.model.profiling.node_trial import Trial
from penstock.model.profiling.saved_tensors import Ledger, Saved, num_bytes, record_saved
from penstock.model.visit import RunNode

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured

_MOST_REASON = 120  # characters of an error in a warning

Progress = Callable[[int, int, str], None]
_GUESSED_SECONDS, _GUESSED_RATE = 1e-5, 1e10  # for nodes that cannot run: seconds, and bytes per second
_TRIES = 3  # runs with other random numbers, for nodes that the first run skipped
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Examiner(Protocol[T_co]):
    """An object that finds the costs of nodes."""

    def examine(self, trial: Trial) -> T_co:
        """Return the costs of a node."""
        ...

    def guess(self, trial: Trial, seconds: float) -> T_co:
        """Return guessed costs of a node that cannot be examined; `seconds` is the time of its only forward."""
        ...


@dataclass(frozen=True)
class Survey(Generic[T]):
    """The result of a survey: one entry per node, or more.

    A node has several entries if it has functions between module calls: these are examined separately from the calls.
    """

    found: list[T]  # the results of the examiner, in execution order
    node_of: list[int]  # the node of each entry
    # memory that the forward keeps for the backward; each piece counts at the first node that keeps it
    saved_bytes: list[float]
    pending_bytes: list[float]  # memory that the weight gradient needs
    graph: Graph  # the graph of the nodes
    batch_size: int  # the number of samples in the micro-batch

    def sums(self, *columns: Sequence[float] | NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """Return the sums per node of columns with one number per entry, then of the saved and the pending bytes."""
        every = (*columns, self.saved_bytes, self.pending_bytes)
        sums = (
            np.bincount(self.node_of, weights=np.asarray(column), minlength=len(self.graph.nodes)) for column in every
        )
        return [cast("NDArray[np.float64]", column) for column in sums]

    def profile(self, sums: Sequence[NDArray[np.float64]], *, device: str, method: str) -> Profile:
        """Return the profile with these sums per node."""
        forward, input_grad, weight_grad, saved, pending = sums
        return Profile(
            self.graph, self.batch_size, forward, input_grad, weight_grad, saved, pending, device=device, method=method
        )


def survey(
    captured: Captured,
    examiner: Examiner[T],
    *,
    device: torch.device | None,
    batch_size: int | None,
    progress: Progress | None,
) -> Survey[T]:
    """Run a captured model once and examine each kind of node when it first occurs.

    Nodes with the same signature and with tensors of the same shapes, types and strides are examined once. Tensors that
    a node may change (buffers, inputs) are copied. The states of random generators are restored.

    A model whose control flow depends on data or random numbers may skip nodes in this run: see `_fill_gaps`. If a
    model cannot run node by node at all, for example because its forward computes gradients, all costs are guessed from
    the sizes of its parameters.

    Raises:
        UsageError: if the batch size is not positive.
        GraphError: if a model with fixed control flow skips nodes.
    """
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise UsageError(f"batch_size: {batch_size} must be at least 1")
    visitor = _Surveyor(captured.graph, examiner, progress)
    with _random_state_kept(device):
        try:
            captured.visit(visitor, device=device, batch_size=batch_size)
        except PenstockError:
            raise
        except Exception as error:
            _guess_all(captured, visitor, error)
        if visitor.missing and getattr(captured, "is_dynamic", False):
            _fill_gaps(captured, visitor, device=device, batch_size=batch_size)
        elif visitor.missing:
            shown = ", ".join(captured.graph.nodes[index].name for index in visitor.missing[:5])
            raise GraphError(f"a run of the model skipped some of its nodes: {shown}")
    if visitor.notes:
        more = f" (and {len(visitor.notes) - 3} more)" if len(visitor.notes) > 3 else ""
        shown = "; ".join(visitor.notes[:3])
        warn_user(f"some nodes cannot be measured alone, so their costs are guessed: {shown}{more}")
    node_of, found, saved_bytes, pending_bytes = (list(column) for column in zip(*visitor.rows, strict=True))
    size = captured.graph.batch_size if batch_size is None else batch_size
    return Survey(found, node_of, saved_bytes, pending_bytes, captured.graph, size)


def distinct_nodes(graph: Graph) -> int:
    """Return the approximate number of nodes that a survey will examine."""
    return len({_kind(graph, node) for node in graph.nodes})


def _kind(graph: Graph, node: Node) -> Hashable:
    return (node.signature or node.name, *(str(graph.values[v]) for v in node.inputs))


def _fill_gaps(
    captured: Captured, visitor: _Surveyor[T], *, device: torch.device | None, batch_size: int | None
) -> None:
    """Find the costs of nodes that a run skipped because control flow depends on data or random numbers.

    Run again with other random numbers, then use the costs of equal nodes, then run with the example itself, with which
    the model was captured. Nodes that are still missing cost nothing, and a warning names them.
    """
    visitor.progress = None
    for _ in range(_TRIES):
        _visit_missing(captured, visitor, device, batch_size)
    graph = captured.graph
    twin_of = {_kind(graph, node): i for i, node in enumerate(graph.nodes) if i not in visitor.missing}
    for index in visitor.missing:
        twin = twin_of.get(_kind(graph, graph.nodes[index]))
        if twin is not None:
            visitor.rows += [(index, *row[1:]) for row in visitor.rows if row[0] == twin]
            visitor.seen.add(index)
    _visit_missing(captured, visitor, device, None)
    visitor.rows.sort(key=lambda row: row[0])
    if visitor.missing:
        names = ", ".join(graph.nodes[index].name for index in visitor.missing[:5])
        warn_user(f"no profiling run called these nodes, so their costs count as zero: {names}")


def _guess_all(captured: Captured, visitor: _Surveyor[T], error: Exception) -> None:
    """Guess the costs of each node from the bytes of its parameters; this affects only the cuts, not the results."""
    held, graph = held_tensors(captured.model), captured.graph
    visitor.rows.clear()
    for index, node in enumerate(graph.nodes):
        parameters = [_leaf(held[n], graph.parameters[n].is_trainable) for n in node.parameters if n in held]
        trial = Trial(node, lambda *_: [], inputs=[], parameters=parameters, writes_inputs=False)
        seconds = _GUESSED_SECONDS + sum(num_bytes(tensor) for tensor in parameters) / _GUESSED_RATE
        visitor.rows.append((index, visitor.examiner.guess(trial, seconds), 0.0, 0.0))
        visitor.seen.add(index)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    warn_user(
        f"the model cannot be profiled: it does not run node by node ({type(error).__name__}: {reason}). Its "
        "cuts then depend on the sizes of its parameters; cuts=[...] sets them"
    )


def _visit_missing(
    captured: Captured, visitor: _Surveyor[T], device: torch.device | None, batch_size: int | None
) -> None:
    """Visit the model again for the missing nodes; discard the results for other nodes."""
    missing, num_rows = set(visitor.missing), len(visitor.rows)
    if missing:
        captured.visit(visitor, device=device, batch_size=batch_size)
        visitor.rows[num_rows:] = [row for row in visitor.rows[num_rows:] if row[0] in missing]


class _Surveyor(Generic[T]):
    """A visitor that runs each node once on the real values, and examines new kinds of nodes."""

    def __init__(self, graph: Graph, examiner: Examiner[T], progress: Progress | None) -> None:
        self.graph, self.examiner, self.progress = graph, examiner, progress
        self.known: dict[Hashable, tuple[T, Saved]] = {}
        self.rows: list[tuple[int, T, float, float]] = []  # node, found, saved bytes, pending bytes
        self.seen: set[int] = set()
        self.notes: list[str] = []
        self._ledger = Ledger()
        self._own_inputs: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()
        self._own_held: dict[str, torch.Tensor] = {}

    def __call__(
        self, index: int, run: RunNode, inputs: list[torch.Tensor], parameters: list[torch.Tensor], glue: str = ""
    ) -> list[torch.Tensor]:
        node = self.graph.nodes[index]
        if glue:  # the graph does not show which inputs of this code have gradients; assume that all have
            node = replace(node, op=glue, signature=glue, parameters=(), inputs=())
        held = [self._held(node, name, tensor) for name, tensor in zip(node.parameters, parameters, strict=True)]
        own = [self._input(tensor) for tensor in inputs]
        versions = [tensor._version for tensor in own]
        begin = time.perf_counter()
        with torch.no_grad():
            outputs = [tensor.detach() for tensor in run(own, held)]
        seconds = time.perf_counter() - begin
        writes = [tensor._version for tensor in own] != versions
        for tensor in outputs:
            self._ledger.add(tensor)
        found, saved = self._examine(node, run, own, held, writes=writes, seconds=seconds)
        saved_bytes, pending_bytes = self._ledger.count(saved, inputs=own, outputs=outputs)
        self.rows.append((index, found, float(saved_bytes), float(pending_bytes)))
        if not glue:
            self.seen.add(index)
        if self.progress is not None:
            self.progress(len(self.seen), len(self.graph.nodes), node.name)
        return outputs

    @property
    def missing(self) -> list[int]:
        """The nodes that no run has reached."""
        return [index for index in range(len(self.graph.nodes)) if index not in self.seen]

    def _input(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a value without its history; a value of the caller is copied, since a node may change it."""
        if tensor in self._ledger:
            return tensor.detach()
        if tensor not in self._own_inputs:
            own = self._own_inputs[tensor] = tensor.detach().clone()
            self._ledger.add(own, size=num_bytes(own))
        return self._own_inputs[tensor]

    def _held(self, node: Node, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a parameter without its gradient; if the node may change it, a copy that later nodes use too."""
        if name not in self._own_held and (self.graph.parameters[name].is_buffer or node.op.endswith("_")):
            self._own_held[name] = tensor.detach().clone()
        own = self._own_held.get(name, tensor.detach())
        self._ledger.add(own, is_held=True)
        return own

    def _has_grad(self, node: Node, inputs: list[torch.Tensor]) -> list[bool]:
        """Return whether each input gets a gradient.

        A module may be called with more or fewer tensors than its node has values. Then all inputs get one, or none.
        """
        known = [self.graph.values[v].has_grad for v in node.inputs]
        if not node.inputs:
            return [True] * len(inputs)
        return known if len(known) == len(inputs) else [any(known)] * len(inputs)

    def _examine(
        self,
        node: Node,
        run: RunNode,
        inputs: list[torch.Tensor],
        held: list[torch.Tensor],
        *,
        writes: bool,
        seconds: float,
    ) -> tuple[T, Saved]:
        has_grad = self._has_grad(node, inputs)
        trains = [self.graph.parameters[name].is_trainable for name in node.parameters]
        looks = tuple(_look(tensor) for tensor in (*inputs, *held))
        key = (node.signature or node.name, len(inputs), looks, *has_grad, *trains, writes)
        if key not in self.known:
            trial = Trial(
                node,
                run,
                inputs=[_leaf(tensor, wanted) for tensor, wanted in zip(inputs, has_grad, strict=True)],
                parameters=[
                    _leaf(tensor.clone() if name in self._own_held else tensor, wanted)
                    for name, tensor, wanted in zip(node.parameters, held, trains, strict=True)
                ],
                writes_inputs=writes,
            )
            self.known[key] = self._try(trial, seconds)
        return self.known[key]

    def _try(self, trial: Trial, seconds: float) -> tuple[T, Saved]:
        try:
            saved = record_saved(trial)  # this is also the warm-up
            return self.examiner.examine(trial), saved
        except PenstockError:
            raise
        except Exception as error:
            # the message of a KeyError is only the key, which may be an object of Penstock
            message = "" if isinstance(error, KeyError) else next(iter(str(error).splitlines()), "")
            reason = f"{type(error).__name__}{message and ': '}{in_short(message, _MOST_REASON)}"
            self.notes.append(f"{trial.node.name} ({_function_in(trial.node.op)}): {reason}")
            return self.examiner.guess(trial, seconds), Saved.guessed(trial)


def _function_in(op: str) -> str:
    """Return the name at the start of an operation; the text after it distinguishes its arguments.

    >>> _function_in("cumsum_Built(parts=(Slot(index=0),))"), _function_in("Linear")
    ('cumsum', 'Linear')
    """
    return op.partition("_Built(")[0].partition("(")[0]


def _leaf(tensor: torch.Tensor, wants_grad: bool) -> torch.Tensor:
    can = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(wants_grad and can)


def _look(tensor: torch.Tensor) -> Hashable:
    """Return the properties of a tensor that affect how long an operation on it takes."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return (tuple(tensor.shape), strides, tensor.dtype, str(tensor.layout))


@contextlib.contextmanager
def _random_state_kept(device: torch.device | None) -> Iterator[None]:
    """Restore the states of all random generators on exit."""
    used = cuda.is_in_use() or (device is not None and device.type == "cuda" and cuda.has_gpu())
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(cuda.num_gpus()) if used else []):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
