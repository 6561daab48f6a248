"""Kinds of devices: the operations that Penstock needs beside lane streams, with a CPU side and a CUDA side."""

from __future__ import annotations

import platform

import torch

from penstock.devices.cuda import Cuda
from penstock.devices.cuda_streams import Event
from penstock.errors import UsageError


class Cpu:
    """The kind of a CPU, and of device types that Penstock does not know. `Cuda` describes the methods."""

    def name(self, device: torch.device) -> str:  # noqa: ARG002 - as of a GPU
        """Return the processor architecture and the number of threads that torch uses."""
        return f"{platform.machine()}, {torch.get_num_threads()} threads"

    def synchronize(self, device: torch.device) -> None:
        """Do nothing on a CPU; synchronize a device of an unknown type."""
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def record_event(self, device: torch.device, *, blocking: bool = False) -> None:
        """Return None: the work is done already."""

    def wait_event(self, device: torch.device, event: Event | None) -> None:  # noqa: ARG002 - as of a GPU
        """Let the host wait for an event of another device."""
        if event is not None:
            event.synchronize()

    def hold(self, tensor: torch.Tensor) -> None:
        """Do nothing: the work is done already."""

    def peak_bytes(self, device: torch.device) -> None:
        """Return None: torch does not count the memory of CPU tensors."""

    def release_memory(self) -> None:
        """Do nothing: torch caches no CPU memory."""

    def random_state(self, device: torch.device) -> torch.Tensor:  # noqa: ARG002 - as of a GPU
        """Return the state of torch's CPU generator."""
        return torch.get_rng_state()

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:  # noqa: ARG002 - as of a GPU
        """Restore a state of torch's CPU generator."""
        torch.set_rng_state(state)


DeviceKind = Cpu | Cuda
_CPU, _CUDA = Cpu(), Cuda()


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device."""
    return _CUDA if device.type == "cuda" else _CPU


def check_device(given: torch.device | str | int, argument: str = "device") -> torch.device:
    """Return the device; a GPU gets its index. `argument` is the name of the argument in error messages.

    Raises:
        UsageError: if the device does not exist or cannot run anything.
    """
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise UsageError(f"{argument}: {given!r} cannot be used: {str(error).splitlines()[0]}") from None
    if device.type == "meta":
        raise UsageError(f"{argument}: the meta device cannot run anything")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def has_graphs(device: torch.device) -> bool:
    """Return whether work on a device can be captured as a graph."""
    return device.type == "cuda"
