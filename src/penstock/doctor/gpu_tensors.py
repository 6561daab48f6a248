"""GPU tensors: which tensors are on the GPU; without a GPU, which would be."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.devices import cuda


class GpuTensors:
    """Tells device tensors from host tensors, on a machine with a GPU: each tensor knows its own device."""

    is_real = True  # whether there is a device to wait for

    @property
    def name(self) -> str:
        """The name of the device; empty without a device."""
        return cuda.Cuda().name(torch.device("cuda"))

    @property
    def is_in_use(self) -> bool:
        """Whether the script has used the GPU. The watch must not use it first: the script may choose one, or fork."""
        return cuda.is_in_use()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.is_cuda

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a host tensor is in pinned memory."""
        return tensor.is_pinned()

    def mark_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the results of an operation on device tensors, if tensors do not know their device."""

    def mark_fetched(self, tensor: torch.Tensor) -> None:
        """Mark a tensor that was copied to the host, if tensors do not know their device."""

    def forget_freed(self) -> None:
        """Forget freed tensors."""


class AssumedGpuTensors(GpuTensors):
    """For a machine without a GPU: assumes that parameters and everything computed from them would be on it.

    It marks memory instead of tensors, because a view, such as the result of detach(), shares its memory.
    """

    is_real = False
    name = ""
    is_in_use = False

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}  # while the reference is held, its number is not reused

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would be on the device."""
        return tensor.requires_grad or (bool(self._marked) and _number(tensor) in self._marked)

    def is_pinned(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - unknown, so nothing is reported
        """Return True, since this is unknown."""
        return True

    def mark_results(self, tensors: Iterable[torch.Tensor]) -> None:
        """Mark the results of an operation on device tensors."""
        for tensor in tensors:
            number = _number(tensor)
            if number and number not in self._marked:
                self._marked[number] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def mark_fetched(self, tensor: torch.Tensor) -> None:
        """Mark a tensor that was copied to the host."""
        self._marked.pop(_number(tensor), None)

    def forget_freed(self) -> None:
        """Forget freed tensors."""
        gone = [number for number, held in self._marked.items() if held.expired()]  # type: ignore[no-untyped-call]
        for number in gone:
            del self._marked[number]


def _number(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's memory; 0 if it has none, as for wrapper tensors."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
