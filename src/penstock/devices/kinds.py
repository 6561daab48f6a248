"""Kinds of devices: the operations that Penstock needs beside lane streams, with a CPU side and a CUDA side."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.devices.cpu import Cpu
from penstock.devices.cuda import Cuda
from penstock.devices.cuda_streams import Event


class DeviceKind(Protocol):
    """What one kind of device can do. All methods work on a CPU too, where most of them do nothing."""

    def name(self, device: torch.device) -> str:
        """Return a readable name of the device."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all its work."""
        ...

    def record_event(self, device: torch.device, *, blocking: bool = False) -> Event | None:
        """Return an event after this thread's work so far; None if that work is done already.

        Args:
            device: the device.
            blocking: a thread that waits for the event sleeps, and does not occupy its core.
        """
        ...

    def wait_event(self, device: torch.device, event: Event | None) -> None:
        """Let this thread's later work on the device wait for an event."""
        ...

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until this thread's work so far has run."""
        ...

    def peak_bytes(self, device: torch.device) -> int | None:
        """Return the peak memory of all tensors; None if the device does not count it."""
        ...

    def release_memory(self) -> None:
        """Free the memory that torch caches for later tensors."""
        ...

    def random_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the device's random generator."""
        ...

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Restore a state of the device's random generator."""
        ...


_CPU: DeviceKind = Cpu()
_KINDS: dict[str, DeviceKind] = {"cuda": Cuda()}


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device."""
    return _KINDS.get(device.type, _CPU)
