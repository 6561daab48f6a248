"""Lane group: the lanes of a pipeline, as threads of this process or as processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from penstock.errors import UsageError, nearest
from penstock.runtime.lanes.thread_lanes import ThreadLanes

if TYPE_CHECKING:
    from penstock.runtime.lanes.process_lanes import ProcessLanes

TRANSPORTS = ("auto", "shared", "gloo", "nccl")


# all lanes of a pipeline, seen from one process
LaneGroup: TypeAlias = "ThreadLanes | ProcessLanes"


def world_size() -> int:
    """Return the number of processes in torch.distributed, or of those that torchrun started."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def process_rank() -> int:
    """Return the number of this process among them, which is also its lane."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def make_lane_group(
    devices: Sequence[torch.device], *, timeout_seconds: float, num_threads: int | None, transport: str
) -> LaneGroup:
    """Return the lanes of a pipeline: threads of this process, or processes.

    Args:
        devices: the device of each lane.
        timeout_seconds: the longest time that a lane waits for a value.
        num_threads: the number of threads that torch may use in each lane; None leaves torch's setting.
        transport: one of `TRANSPORTS`.
    """
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
