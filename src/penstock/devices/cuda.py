"""CUDA: GPUs of NVIDIA, and those of AMD through ROCm, which torch also calls "cuda"."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.devices.cuda_streams import Event, Stream


class Cuda:
    """The kind of a GPU: what Penstock needs of a device beside the streams of lanes."""

    def name(self, device: torch.device) -> str:
        """Return a readable name of the device."""
        return torch.cuda.get_device_name(device)

    def synchronize(self, device: torch.device) -> None:
        """Wait until the device has finished all its work."""
        torch.cuda.synchronize(device)

    def record_event(self, device: torch.device, *, blocking: bool = False) -> Event:
        """Return an event after this thread's work so far.

        Args:
            device: the device.
            blocking: a thread that waits for the event sleeps, and does not occupy its core.
        """
        event = torch.cuda.Event(blocking=blocking)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def wait_event(self, device: torch.device, event: Event | None) -> None:
        """Let the current stream wait for an event; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)

    def hold(self, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory until the current stream has finished its work so far."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def peak_bytes(self, device: torch.device) -> int:
        """Return the peak memory of all tensors."""
        return torch.cuda.max_memory_allocated(device)

    def release_memory(self) -> None:
        """Free the memory that torch caches for later tensors."""
        torch.cuda.empty_cache()

    def random_state(self, device: torch.device) -> torch.Tensor:
        """Return the state of the GPU's random generator."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Restore a state of the GPU's random generator."""
        torch.cuda.set_rng_state(state, device)


# ---- the GPUs of this process


def has_gpu() -> bool:
    """Return whether there is a GPU."""
    return torch.cuda.is_available()


def num_gpus() -> int:
    """Return the number of GPUs."""
    return torch.cuda.device_count()


def is_in_use() -> bool:
    """Return whether this process has used a GPU; a process forked after that cannot use one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def current_gpu() -> int:
    """Return the index of this thread's current GPU."""
    return torch.cuda.current_device()


def on_gpu(device: torch.device | int) -> AbstractContextManager[Any]:
    """Make a GPU the current one."""
    return torch.cuda.device(device)


def random_states() -> list[torch.Tensor]:
    """Return the states of all GPUs' random generators; an empty list if no GPU has been used."""
    return torch.cuda.get_rng_state_all() if is_in_use() else []


def set_random_states(states: list[torch.Tensor]) -> None:
    """Restore the states of all GPUs' random generators."""
    if states:
        torch.cuda.set_rng_state_all(states)


# ---- time


def timed_events() -> tuple[Event, Event]:
    """Return two events that measure the time between them."""
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def sleep(cycles: int) -> None:
    """Let the GPU wait for a number of clock cycles, so that the host can run ahead."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def blocking_event(stream: Stream) -> Event:
    """Return an event recorded on a stream; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


# ---- what makes the host wait


def waiting_calls() -> list[tuple[Any, bool]]:
    """Return the objects that have a method `synchronize`, each with a flag: is all work done afterwards?"""
    return [(torch.cuda, True), (torch.accelerator, True), (torch.cuda.Stream, True), (torch.cuda.Event, False)]


def has_nothing_to_do() -> bool:
    """Return whether the current stream is idle and not capturing."""
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.current_stream().query()


def sync_mode() -> int:
    """Return how torch reports calls that make the host wait."""
    return torch.cuda.get_sync_debug_mode()


def set_sync_mode(mode: int | str) -> None:
    """Set how torch reports calls that make the host wait."""
    torch.cuda.set_sync_debug_mode(mode)
