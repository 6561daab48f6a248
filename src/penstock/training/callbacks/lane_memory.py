"""What each lane of a pipeline holds in memory, wherever the lanes are."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.devices.kinds import kind_of
from penstock.pipeline.executor_setup import stage_on

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.report.timeline import Timeline

__all__ = ["lane_bytes"]


def lane_bytes(
    pipe: Pipeline, *, optimizers: Iterable[torch.optim.Optimizer] = (), timeline: Timeline | None = None
) -> tuple[int, ...]:
    """Return what each lane holds, for all lanes; called by all processes, between steps.

    On a GPU that is the most that its device has held. On CPUs it is what the lane's process holds now; where lanes are
    threads of one, it is the lane's parameters, gradients, buffers and optimizer state, and the most that saved values
    took in a recorded step. What several of them share counts on the first.

    Args:
        pipe: the pipeline.
        optimizers: of its parameters.
        timeline: of a step that was recorded.
    """
    are_processes = len(pipe.lanes) < pipe.schedule.num_lanes
    state_of = {} if are_processes else _states(optimizers)
    seen: set[int] = set()
    own = []
    for lane in pipe.lanes:
        device = pipe.devices[lane]
        counted = kind_of(device).peak_bytes(device)
        if counted is not None:
            own.append(counted)
        elif are_processes:
            own.append(_resident_bytes() // len(pipe.lanes))
        else:
            saved = 0 if timeline is None else int(timeline.peak_bytes[lane])
            own.append(_held_bytes(pipe, lane, state_of, seen) + saved)
    everyone = pipe.internals.gather([[lane, size] for lane, size in zip(pipe.lanes, own, strict=True)])
    found = {lane: size for process in everyone for lane, size in process}
    return tuple(found[lane] for lane in sorted(found))


def _held_bytes(pipe: Pipeline, lane: int, state_of: dict[int, int], seen: set[int]) -> int:
    """Return what a lane holds between steps, and the gradients, which a step fills; what was seen does not count."""
    total = 0
    for s in pipe.schedule.stages_of(lane):
        held = stage_on(pipe.internals.chains, pipe.schedule, lane, s).held
        for tensor in (held.get(name) for name in held):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                total += _num_bytes(tensor) * (2 if tensor.requires_grad else 1) + state_of.get(id(tensor), 0)
    return total


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """Return the bytes of each parameter's optimizer state, by the parameter's identity."""
    return {
        id(parameter): sum(_num_bytes(value) for value in state.values() if isinstance(value, torch.Tensor))
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
    }


def _num_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor.nbytes
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse ones have several
        return 0


def _resident_bytes() -> int:
    """Return what this process holds in memory: now where the system tells, else at most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
