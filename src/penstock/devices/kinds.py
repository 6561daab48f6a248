"""Kinds: what Penstock needs of a kind of device, beside the streams of lanes; a CPU side and a CUDA side."""

from __future__ import annotations

from typing import Protocol

import torch

from penstock.devices.cpu import Cpu
from penstock.devices.cuda import Cuda
from penstock.devices.cuda_streams import Event

__all__ = ["DeviceKind", "kind_of"]


class DeviceKind(Protocol):
    """What one kind of device can do. Every verb works on a CPU too, where most have nothing to do."""

    def name(self, device: torch.device) -> str:
        """Return the device as people name it."""
        ...

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has nothing left to do."""
        ...

    def record_event(self, device: torch.device, *, blocking: bool = False) -> Event | None:
        """Return an event after all that this thread gave the device; None if that is done already.

        Args:
            device: the device.
            blocking: a thread that waits for the event sleeps, instead of using its core.
        """
        ...

    def wait_event(self, device: torch.device, event: Event | None) -> None:
        """Let what this thread gives the device from now on wait for an event."""
        ...

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until what this thread gave its device has run."""
        ...

    def peak_bytes(self, device: torch.device) -> int | None:
        """Return how much memory tensors took at most; None if the device does not count that."""
        ...

    def release_memory(self) -> None:
        """Give back memory that torch keeps for later."""
        ...

    def random_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the device's random generator."""
        ...

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Go back to a state of the device's random generator."""
        ...


_CPU: DeviceKind = Cpu()
_KINDS: dict[str, DeviceKind] = {"cuda": Cuda()}


def kind_of(device: torch.device) -> DeviceKind:
    """Return what a device can do."""
    return _KINDS.get(device.type, _CPU)
