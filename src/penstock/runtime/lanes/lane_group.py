"""Lane group: the lanes of a pipeline, as threads of this process or as processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from penstock.devices.streams import Streams, make_streams, ordered_step
from penstock.errors import UsageError, nearest
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.control_plane import ControlPlane, OneProcess
from penstock.runtime.lanes.shared_values import OneProcessValues, SharedValues
from penstock.runtime.lanes.thread_lanes import LaneThreads
from penstock.runtime.step import Step
from penstock.runtime.wire.transport import Transport

TRANSPORTS = ("auto", "shared", "gloo", "nccl")


class LaneGroup(Protocol):
    """All lanes of a pipeline, seen from one process."""

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that run in this process."""
        ...

    @property
    def transports(self) -> Mapping[int, Transport]:
        """The transports of these lanes."""
        ...

    @property
    def streams(self) -> Mapping[int, Streams]:
        """The streams of these lanes."""
        ...

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the streams; the lanes of one group hold the same tensors."""
        ...

    @property
    def control(self) -> ControlPlane:
        """The control plane of this process."""
        ...

    @property
    def values(self) -> SharedValues:
        """The values that lanes exchange outside of their programs."""
        ...

    @property
    def rows(self) -> Mapping[int, memoryview]:
        """The rows of the status board where these lanes write their current actions."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time that a lane waits for a value."""
        ...

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run a step on the lanes of this process.

        Raises:
            LaneError: if an action failed on any lane.
        """
        ...

    def close(self) -> None:
        """Stop the lanes."""
        ...


class ThreadLanes:
    """All lanes as threads of this process."""

    def __init__(self, devices: Sequence[torch.device], *, timeout_seconds: float, num_threads: int | None) -> None:
        num_lanes = len(devices)
        self._devices = devices
        self._threads = LaneThreads(num_lanes, timeout_seconds=timeout_seconds, num_threads=num_threads)
        self.streams: Mapping[int, Streams] = {}
        self.control, self.values = OneProcess(), OneProcessValues()
        self.lanes = tuple(range(num_lanes))
        self.transports: Mapping[int, Transport] = dict(enumerate(self._threads.transports))
        self.rows = {lane: self._threads.board.row(lane) for lane in self.lanes}

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the streams; the lanes of one group hold the same tensors."""
        self.streams = self._threads.streams = make_streams(dict(enumerate(self._devices)), groups)

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time that a lane waits for a value."""
        self._threads.timeout_seconds = self._threads.boxes.timeout_seconds = seconds

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run a step on all lanes."""
        with self._on_streams(step, is_recorded=spans is not None):
            self._threads.run(executors, step, spans)

    def _on_streams(self, step: Step, *, is_recorded: bool) -> AbstractContextManager[None]:
        """Return a context that orders the step after the caller's earlier work, and the later work after the step."""
        is_replay = step.tapes is not None and all(tape.is_replay for tape in step.tapes.values())
        return ordered_step(self.streams, may_lend=is_replay and not is_recorded)

    def close(self) -> None:
        """Stop the lanes."""
        self._threads.close()


def world_size() -> int:
    """Return the number of processes in torch.distributed, or of those that torchrun started."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def make_lane_group(
    devices: Sequence[torch.device], *, timeout_seconds: float, num_threads: int | None, transport: str
) -> LaneGroup:
    """Return the lanes of a pipeline: threads of this process, or processes."""
    if transport not in TRANSPORTS:
        raise UsageError(
            f"transport: {transport!r} is not one of {', '.join(TRANSPORTS)}.{nearest(transport, TRANSPORTS)}"
        )
    if world_size() > 1:
        from penstock.runtime.lanes.process_lanes import ProcessLanes

        return ProcessLanes(devices, timeout_seconds=timeout_seconds, transport=transport)
    if transport != "auto":
        raise UsageError(f"transport: {transport!r} needs lanes that are processes; these are threads: leave it out")
    return ThreadLanes(devices, timeout_seconds=timeout_seconds, num_threads=num_threads)
