"""CPU: the device kind whose work is done when the call returns."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.devices.cuda_streams import Event


class Cpu:
    """The CPU side of `DeviceKind`; also used for device types that Penstock does not know."""

    def name(self, device: torch.device) -> str:  # noqa: ARG002 - as the interface has it
        """Return the processor architecture and the number of threads that torch uses."""
        return f"{platform.machine()}, {torch.get_num_threads()} threads"

    def synchronize(self, device: torch.device) -> None:
        """Do nothing on a CPU; synchronize a device of an unknown type."""
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def record_event(self, device: torch.device, *, blocking: bool = False) -> None:
        """Return None: the work is done already."""

    def wait_event(self, device: torch.device, event: Event | None) -> None:  # noqa: ARG002 - as the interface has it
        """Let the host wait for an event of another device."""
        if event is not None:
            event.synchronize()

    def hold(self, tensor: torch.Tensor) -> None:
        """Do nothing: the work is done already."""

    def peak_bytes(self, device: torch.device) -> None:
        """Return None: torch does not count the memory of CPU tensors."""

    def release_memory(self) -> None:
        """Do nothing: torch caches no CPU memory."""

    def random_state(self, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - as the interface has it
        """Return the state of torch's CPU generator."""
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:  # noqa: ARG002 - as the interface has it
        """Restore a state of torch's CPU generator."""
        torch.set_rng_state(state)
