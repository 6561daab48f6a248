"""Streams: the order of a lane's work, and the copies of values to the lane."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from penstock.devices import cuda_streams
from penstock.devices.cuda_streams import CudaStreams, Event, LentStream, Workspace

__all__ = [
    "Event", "HostStreams", "Stamp", "Streams", "Workspace", "after_callers", "make_streams", "ordered_step",
    "streams_of",
]  # fmt: skip

Stamp = int | Event  # nanoseconds on the host's clock, or a GPU event that yields them later


class HostStreams:
    """The work of a lane on a CPU. It is done when the call returns, so nothing needs an order.

    `CudaStreams` describes the methods.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def running(self) -> AbstractContextManager[None]:
        """Run the work of this thread as the lane's work."""
        return _NO_CONTEXT

    capturing = running

    def event(self) -> None:
        """Return None: there is nothing to wait for."""

    mark = event

    def record(self, event: Event | None) -> None:
        """Do nothing: the work is done already."""

    copy_after = record

    def copy_after_compute(self) -> None:
        """Do nothing: a copy is done when the call returns."""

    start_clock = copy_after_compute

    def stamp(self) -> int:
        """Return the time on the host's clock."""
        return time.monotonic_ns()

    def nanoseconds(self, stamp: Any) -> int:  # noqa: ANN401 - what `stamp` returned
        """Return the stamp itself."""
        return int(stamp)

    def bring(self, values: Sequence[Any], ready: Event | None, into: Workspace | None = None) -> Sequence[Any]:
        """Return values in host memory; values of a GPU are waited for and copied."""
        if ready is not None:
            ready.synchronize()
            values = [_on_host(value) for value in values]
        if into is None:
            return values
        return [
            value if place is None or not isinstance(value, torch.Tensor)
            else place.detach().copy_(value.detach()).requires_grad_(value.requires_grad)
            for value, place in zip(values, into(values), strict=True)
        ]  # fmt: skip


Streams = HostStreams | CudaStreams  # the order of one lane's work

_NO_CONTEXT = nullcontext()


def _on_host(value: Any) -> Any:  # noqa: ANN401 - a tensor, or a plain number
    return value.detach().cpu().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a lane on a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams(device)


def make_streams(devices: Mapping[int, torch.device], groups: Iterable[Sequence[int]] = ()) -> dict[int, Streams]:
    """Return the streams of each lane.

    Args:
        devices: the device of each lane.
        groups: lanes that hold the same tensors. On a GPU they share one compute stream, because two streams must not
            add to one gradient at the same time.
    """
    made: dict[int, Streams] = {}
    group_of = {lane: number for number, group in enumerate(groups) for lane in group}
    common: dict[tuple[int, torch.device], CudaStreams] = {}
    for lane, device in devices.items():
        key = (group_of.get(lane, -1 - lane), device)
        first = common.get(key)
        if first is not None:
            first.is_shared = True
            made[lane] = CudaStreams(device, first.compute)
            continue
        made[lane] = own = streams_of(device)
        if isinstance(own, CudaStreams):
            common[key] = own
    return made


def _on_gpus(streams: Mapping[int, Streams]) -> list[CudaStreams]:
    return [own for own in streams.values() if isinstance(own, CudaStreams)]


def ordered_step(streams: Mapping[int, Streams], *, may_lend: bool = False) -> AbstractContextManager[None]:
    """Order a step after the caller's earlier work, and the caller's later work after the step.

    Args:
        streams: the streams of the lanes that run here.
        may_lend: a single lane may run the step on the caller's stream, because the step launches no torch operations.
    """
    own = _on_gpus(streams)
    if not own:
        return _NO_CONTEXT
    if may_lend and len(own) == 1 == len(streams) and own[0].device.index == torch.cuda.current_device():
        return LentStream(own[0])
    return cuda_streams.ordered_after_callers(own)


def after_callers(streams: Mapping[int, Streams]) -> None:
    """Order the caller's later work after the last step, whichever of the caller's streams requested that step."""
    cuda_streams.first_lane_streams(_on_gpus(streams))
