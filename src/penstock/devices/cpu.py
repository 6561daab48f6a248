"""CPU: work is done when the call returns, so there is nothing to wait for."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penstock.devices.cuda_streams import Event

__all__ = ["Cpu"]


class Cpu:
    """The CPU side of `DeviceKind`, and that of devices that Penstock does not know."""

    def name(self, device: torch.device) -> str:  # noqa: ARG002 - as the interface has it
        """Return the kind of processor and how many threads torch uses."""
        return f"{platform.machine()}, {torch.get_num_threads()} threads"

    def synchronize(self, device: torch.device) -> None:
        """Wait for devices that are no CPUs."""
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def record_event(self, device: torch.device, *, blocking: bool = False) -> None:
        """Work is done already."""

    def wait_event(self, device: torch.device, event: Event | None) -> None:  # noqa: ARG002 - as the interface has it
        """Let the host wait."""
        if event is not None:
            event.synchronize()

    def hold(self, tensor: torch.Tensor) -> None:
        """Work is done already."""

    def peak_bytes(self, device: torch.device) -> None:
        """Torch does not count the memory of tensors on a CPU."""

    def release_memory(self) -> None:
        """Torch keeps none."""

    def random_state(self, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - as the interface has it
        """Return the state of torch's generator."""
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:  # noqa: ARG002 - as the interface has it
        """Go back to a state of torch's generator."""
        torch.set_rng_state(state)
