"""Where: which tensors are on the GPU; without one, which would be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.devices import cuda

__all__ = ["OnGpu", "Where", "WouldBe"]


class Where(Protocol):
    """Tells tensors of the device from those of the host; `is_real` says if there is a device to wait for."""

    is_real: bool

    @property
    def name(self) -> str:
        """The device's name; empty where there is none."""
        ...

    @property
    def is_in_use(self) -> bool:
        """Has anybody asked the device for something yet?"""
        ...

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Is this tensor's memory the device's?"""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Is this tensor of the host in memory that the device can read by itself?"""
        ...

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of tensors that were made from some on the device."""
        ...

    def fetched(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was brought to the host."""
        ...

    def tidy(self) -> None:
        """Forget what is gone."""
        ...


class OnGpu:
    """There is a GPU: tensors say themselves where they are."""

    is_real = True

    @property
    def name(self) -> str:
        """The GPU's name."""
        return cuda.Cuda().name(torch.device("cuda"))

    @property
    def is_in_use(self) -> bool:
        """Has the script used the GPU? Not before may we: it may choose which, or fork processes that use it."""
        return cuda.is_in_use()

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Is this tensor's memory the device's?"""
        return tensor.is_cuda

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Can the device read this tensor of the host by itself?"""
        return tensor.is_pinned()

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of tensors that were made from some on the device."""

    def fetched(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was brought to the host."""

    def tidy(self) -> None:
        """Forget what is gone."""


class WouldBe:
    """There is no GPU. Parameters would be on it, and whatever is made from them; of the rest nobody knows.

    Memory is marked rather than tensors: a view, as detach() is, has the memory of what it views.
    """

    is_real = False
    name = ""
    is_in_use = False

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}  # as long as the reference is held, its number is not used again

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        """Is this tensor's memory the device's?"""
        return tensor.requires_grad or (bool(self._marked) and _number(tensor) in self._marked)

    def is_pinned(self, tensor: torch.Tensor) -> bool:  # noqa: ARG002 - nobody knows, so nothing is said of it
        """Can the device read this tensor of the host by itself?"""
        return True

    def made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take note of tensors that were made from some on the device."""
        for tensor in tensors:
            number = _number(tensor)
            if number and number not in self._marked:
                self._marked[number] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def fetched(self, tensor: torch.Tensor) -> None:
        """Take note of a tensor that was brought to the host."""
        self._marked.pop(_number(tensor), None)

    def tidy(self) -> None:
        """Forget what is gone."""
        gone = [number for number, held in self._marked.items() if held.expired()]  # type: ignore[no-untyped-call]
        for number in gone:
            del self._marked[number]


def _number(tensor: torch.Tensor) -> int:
    """Return the number of a tensor's memory; 0 where it has none, as those that wrap others."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0
