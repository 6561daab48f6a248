"""Company: the lanes that make up a pipeline, in this process or in several, and what they do together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from penstock.devices.streams import Lent, Streams, joined, make_streams
from penstock.errors import UsageError, nearest
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.thread_lanes import LaneThreads
from penstock.runtime.step import Step
from penstock.runtime.wire.transport import Transport
from penstock.schedule.schedule import Schedule

__all__ = ["LaneGroup", "ThreadLanes", "make_lane_group", "world_size"]


TRANSPORTS = ("auto", "shared", "gloo", "nccl")


class LaneGroup(Protocol):
    """All lanes of a pipeline, seen from one process."""

    @property
    def lanes(self) -> tuple[int, ...]:
        """The lanes that run here."""
        ...

    @property
    def transports(self) -> Mapping[int, Transport]:
        """Their ends of the transport."""
        ...

    @property
    def streams(self) -> Mapping[int, Streams]:
        """Their streams, of those that are on GPUs."""
        ...

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the streams; lanes of a group hold the same tensors."""
        ...

    @property
    def rows(self) -> Mapping[int, memoryview]:
        """Where they say what they are doing."""
        ...

    def wait_at_most(self, seconds: float) -> None:
        """Let lanes wait so long for a value, and no longer."""
        ...

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run a step on the lanes that run here.

        Raises:
            LaneError: when an action failed, on whichever lane.
        """
        ...

    def refuse(self, step: int, error: BaseException) -> None:
        """Tell the others that this process does not begin a step."""
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the others of what ends this process outside of a step; may be called by any thread."""
        ...

    def decide(self, choose: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Let one process choose for all; `settings` must be the same everywhere."""
        ...

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what each process gave, in the order of their lanes."""
        ...

    def agree(self, step: Step, what: str, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what each process gave under a name in a step; raises when one refuses the step, or fails."""
        ...

    def exchange(self, number: int, tensors: Sequence[Any], lanes: Sequence[int]) -> list[list[Any]]:
        """Return what each of some lanes gave, in order; called by all of them under the same number."""
        ...

    def share_losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:
        """Return the loss of every micro-batch."""
        ...

    def share_outputs(
        self, outputs: Mapping[int, list[Any]], num_mbs: int, schedule: Schedule, *, to_all: bool
    ) -> Mapping[int, list[Any]] | None:
        """Return the results of every micro-batch, or None where they are for others."""
        ...

    def clock_offset(self) -> float:
        """Return what to add to this process's clock, in seconds, to get that of the first."""
        ...

    def close(self) -> None:
        """Stop the lanes."""
        ...


class ThreadLanes:
    """All lanes in this process: threads."""

    def __init__(self, devices: Sequence[torch.device], *, timeout_seconds: float, num_threads: int | None) -> None:
        num_lanes = len(devices)
        self._devices = devices
        self._threads = LaneThreads(num_lanes, timeout_seconds=timeout_seconds, num_threads=num_threads)
        self.streams: Mapping[int, Streams] = {}
        self.lanes = tuple(range(num_lanes))
        self.transports: Mapping[int, Transport] = dict(enumerate(self._threads.transports))
        self.rows = {lane: self._threads.board.row(lane) for lane in self.lanes}

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the streams; lanes of a group hold the same tensors."""
        self.streams = self._threads.streams = make_streams(dict(enumerate(self._devices)), groups)

    def wait_at_most(self, seconds: float) -> None:
        """Let lanes wait so long for a value, and no longer."""
        self._threads.timeout_seconds = self._threads.boxes.timeout_seconds = seconds

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run a step on all lanes."""
        with self._on_streams(step, is_recorded=spans is not None):
            self._threads.run(executors, step, spans)

    def _on_streams(self, step: Step, *, is_recorded: bool) -> AbstractContextManager[None]:
        """Return what puts the lanes' streams behind the caller's, and those behind the lanes."""
        is_replay = step.tapes is not None and all(tape.is_replay for tape in step.tapes.values())
        if is_replay and not is_recorded and len(self.lanes) == 1 == len(self.streams):
            (own,) = self.streams.values()
            if own.device.index == torch.cuda.current_device():
                return Lent(own)
        return joined(self.streams.values())

    def refuse(self, step: int, error: BaseException) -> None:
        """There are no others."""

    def fail(self, error: BaseException) -> None:
        """There are no others."""

    def decide(self, choose: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Choose."""
        return choose()

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what this process gave."""
        return [thing]

    def agree(self, step: Step, what: str, thing: Any) -> list[Any]:  # noqa: ANN401, ARG002 - whatever JSON can hold
        """Return what this process gave."""
        return [thing]

    def exchange(self, number: int, tensors: Sequence[Any], lanes: Sequence[int]) -> list[list[Any]]:  # noqa: ARG002
        """Return what was given: lanes of one process hold the same parameters."""
        return [list(tensors)]

    def share_losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:  # noqa: ARG002
        """Return the loss of every micro-batch."""
        return step.losses

    def share_outputs(
        self, outputs: Mapping[int, list[Any]], num_mbs: int, schedule: Schedule, *, to_all: bool  # noqa: ARG002
    ) -> Mapping[int, list[Any]] | None:  # fmt: skip
        """Return the results of every micro-batch."""
        return outputs

    def clock_offset(self) -> float:
        """All lanes read one clock."""
        return 0.0

    def close(self) -> None:
        """Stop the lanes."""
        self._threads.close()


def world_size() -> int:
    """Return how many processes there are: those of torch.distributed, or that torchrun started."""
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
        raise UsageError(f"transport: {transport!r} is for lanes that are processes; these are threads: leave it out")
    return ThreadLanes(devices, timeout_seconds=timeout_seconds, num_threads=num_threads)
