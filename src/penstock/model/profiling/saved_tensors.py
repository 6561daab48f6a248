"""Saved: which tensors a node keeps for its backward, and how much memory that is when nodes keep the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.model.profiling.node_trial import Trial

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
    """Knows the memory that a visit has seen and counts each piece once, at the first node that keeps it."""

    def __init__(self) -> None:
        self._bytes_of: dict[int, int] = {}
        self._pins: list[object] = []  # weak references: the memory goes, but no other takes its place in the dict
        self._held: set[int] = set()
        self._saved: set[int] = set()
        self._pending: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._bytes_of

    def add(self, tensor: torch.Tensor, *, is_held: bool = False, size: int | None = None) -> None:
        """Note a tensor's memory, once.

        Args:
            tensor: anything that a node uses or makes.
            is_held: it is a parameter or a buffer, there anyway.
            size: what to count for it; by default all of its memory.
        """
        storage = storage_of(tensor)
        if storage in self._bytes_of:
            return
        self._bytes_of[storage] = storage_bytes(tensor) if size is None else size
        self._pins.append(_pin(tensor))
        if is_held:
            self._held.add(storage)

    def count(
        self, saved: Saved, *, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[int, int]:
        """Return the saved and the pending bytes of a node, without what earlier nodes keep already."""
        tensors = {"input": inputs, "output": outputs}

        def total(kept: Iterable[Kept], seen: set[int]) -> int:
            new = 0
            for item in kept:
                if item.source == "own":
                    new += item.num_bytes
                    continue
                storage = storage_of(tensors[item.source][item.index])
                if storage not in self._held and storage not in seen:
                    seen.add(storage)
                    new += self._bytes_of[storage]
            return new

        return total(saved.kept, self._saved), total(saved.pending, self._pending) + saved.pending_bytes


def _pin(tensor: torch.Tensor) -> object:
    """Return what keeps the address of a tensor's memory from being given to another, but not the memory itself."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return tensor


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
