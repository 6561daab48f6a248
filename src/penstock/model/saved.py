"""Saved: which tensors a node keeps for its backward, and how much memory that is when nodes keep the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from penstock.model.graph import Node
from penstock.model.trial import Trial

__all__ = ["Ledger", "Saved", "num_bytes", "record_saved", "storage_bytes", "storage_of"]


@dataclass(frozen=True)
class Kept:
    """A piece of memory that the backward keeps: of an input, of an output, or made for that purpose."""

    source: Literal["input", "output", "own"]
    index: int
    num_bytes: int


@dataclass(frozen=True)
class Saved:
    """What a node keeps.

    Attributes:
        kept: from the forward to the backward; no parameters or buffers.
        pending: those of them that the weight gradient needs.
        pending_bytes: gradients of the outputs, which the weight gradient needs too.
    """

    kept: tuple[Kept, ...] = ()
    pending: tuple[Kept, ...] = ()
    pending_bytes: int = 0

    @classmethod
    def guessed(cls, trial: Trial) -> Saved:
        """Return what a node keeps that cannot be differentiated alone: all inputs that have a gradient."""
        kept = tuple(
            Kept("input", index, num_bytes(tensor))
            for index, tensor in enumerate(trial.inputs)
            if tensor.requires_grad or trial.wanted_parameters
        )
        return cls(kept, kept if trial.wanted_parameters else ())


def record_saved(trial: Trial) -> Saved:
    """Run a node and note what autograd keeps; what its weight gradient takes out again is what stays pending."""
    tensors: list[torch.Tensor] = []
    taken: set[int] = set()

    def pack(tensor: torch.Tensor) -> int:
        tensors.append(tensor.detach())  # not the tensor itself, which may lead back here
        return len(tensors) - 1

    def unpack(index: int) -> torch.Tensor:
        taken.add(index)
        return tensors[index]

    given = trial.given()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = trial.forward(given)
    backward = trial.backward(outputs)
    if backward is None:
        return Saved()
    kept = _sources(tensors, given, trial.parameters, outputs)
    if not trial.wanted_parameters:
        return Saved(_distinct(kept))
    backward.gradient(trial.wanted_parameters)
    return Saved(
        kept=_distinct(kept),
        pending=_distinct(kept[index] for index in sorted(taken)),
        pending_bytes=sum(num_bytes(grad) for grad in backward.grads),
    )


def _sources(
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> list[Kept | None]:
    """Say for each kept tensor where its memory comes from; None for that of parameters and buffers."""
    held = {storage_of(tensor) for tensor in parameters}
    of_output = {storage_of(tensor): index for index, tensor in reversed([*enumerate(outputs)])}
    of_input = {storage_of(tensor): index for index, tensor in reversed([*enumerate(inputs)])}
    own: dict[int, int] = {}
    kept: list[Kept | None] = []
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage in held:
            kept.append(None)
        elif storage in of_input:
            kept.append(Kept("input", of_input[storage], storage_bytes(tensor)))
        elif storage in of_output:
            kept.append(Kept("output", of_output[storage], storage_bytes(tensor)))
        else:
            kept.append(Kept("own", own.setdefault(storage, len(own)), storage_bytes(tensor)))
    return kept


def _distinct(kept: Iterable[Kept | None]) -> tuple[Kept, ...]:
    return tuple(dict.fromkeys(item for item in kept if item is not None))


class Ledger:
    """Follows the memory of all values through a visit and counts each piece once, at the first node that keeps it."""

    _HELD = -1  # the memory of parameters and buffers: there anyway

    def __init__(self) -> None:
        self._memory_of: dict[int, int] = {}  # value -> piece of memory
        self._bytes: list[int] = []
        self._saved: set[int] = set()
        self._pending: set[int] = set()

    def add_input(self, value: int, tensor: torch.Tensor) -> None:
        """Note an input of the model; a slice of something larger counts for itself."""
        if value not in self._memory_of:
            self._memory_of[value] = self._new(num_bytes(tensor))

    def add_outputs(
        self,
        node: Node,
        *,
        inputs: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Note what a node made: new memory, or that of its inputs or parameters."""
        known = {storage_of(tensor): self._memory_of[v] for v, tensor in zip(node.inputs, inputs, strict=True)}
        known |= {storage_of(tensor): self._HELD for tensor in parameters}
        for value, tensor in zip(node.outputs, outputs, strict=True):
            storage = storage_of(tensor)
            if storage not in known:
                known[storage] = self._new(storage_bytes(tensor))
            self._memory_of[value] = known[storage]

    def count(self, node: Node, saved: Saved) -> tuple[int, int]:
        """Return the saved and the pending bytes of a node, without what earlier nodes keep already."""
        kept = self._count(node, saved.kept, self._saved)
        return kept, self._count(node, saved.pending, self._pending) + saved.pending_bytes

    def _count(self, node: Node, kept: Iterable[Kept], seen: set[int]) -> int:
        total = 0
        for item in kept:
            if item.source == "own":
                total += item.num_bytes
                continue
            memory = self._memory_of[(node.inputs if item.source == "input" else node.outputs)[item.index]]
            if memory != self._HELD and memory not in seen:
                seen.add(memory)
                total += self._bytes[memory]
        return total

    def _new(self, size: int) -> int:
        self._bytes.append(size)
        return len(self._bytes) - 1


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def storage_of(tensor: torch.Tensor) -> int:
    """Return what is the same for tensors that share memory, while they live; on "meta" too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without one
        return id(tensor)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the memory that a tensor lies in."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return num_bytes(tensor)
