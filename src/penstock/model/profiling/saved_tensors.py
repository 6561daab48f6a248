"""Saved tensors: the memory that a node keeps for its backward; memory that several nodes keep counts once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.model.profiling.node_trial import Trial


@dataclass(frozen=True)
class Kept:
    """A piece of memory that is kept for the backward: of an input, of an output, or allocated for this purpose."""

    source: Literal["input", "output", "own"]
    index: int
    num_bytes: int


@dataclass(frozen=True)
class Saved:
    """The memory that a node keeps."""

    # the pieces that are kept from the forward to the backward, without parameters and buffers
    kept: tuple[Kept, ...] = ()
    pending: tuple[Kept, ...] = ()  # the pieces among them that the weight gradient needs
    pending_bytes: int = 0  # the bytes of the gradients of the outputs, which the weight gradient needs too

    @classmethod
    def guessed(cls, trial: Trial) -> Saved:
        """Return a guess for a node that cannot be differentiated alone.

        The guess is the inputs that have a gradient, or all inputs if the node has trainable parameters.
        """
        kept = tuple(
            Kept("input", index, num_bytes(tensor))
            for index, tensor in enumerate(trial.inputs)
            if tensor.requires_grad or trial.wanted_parameters
        )
        return cls(kept, kept if trial.wanted_parameters else ())


def record_saved(trial: Trial) -> Saved:
    """Run a node and record the tensors that autograd keeps; those that the weight gradient unpacks are pending."""
    tensors: list[torch.Tensor] = []
    taken: set[int] = set()

    def pack(tensor: torch.Tensor) -> int:
        tensors.append(tensor.detach())  # the tensor itself could make a reference cycle
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
    """Return the source of the memory of each kept tensor; None for parameters and buffers."""
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
    """A record of the memory that a visit has seen; each piece counts once, at the first node that keeps it."""

    def __init__(self) -> None:
        self._bytes_of: dict[int, int] = {}
        self._pins: list[object] = []  # weak references: memory can be freed, but its key is not used again
        self._held: set[int] = set()
        self._saved: set[int] = set()
        self._pending: set[int] = set()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._bytes_of

    def add(self, tensor: torch.Tensor, *, is_held: bool = False, size: int | None = None) -> None:
        """Record the memory of a tensor, unless it is known.

        Args:
            tensor: a tensor that a node uses or makes.
            is_held: whether it is a parameter or a buffer, whose memory is in use anyway.
            size: the bytes to count; by default, all of its storage.
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
        """Return the saved and the pending bytes of a node, without the memory that earlier nodes already keep."""
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
    """Return an object that reserves the key of a tensor's storage, but does not keep its data."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):
        return tensor


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def storage_of(tensor: torch.Tensor) -> int:
    """Return the key of a tensor's storage, on meta too: equal for tensors that share memory, valid while they live."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, for example, have no storage
        return id(tensor)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage of a tensor."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return num_bytes(tensor)
