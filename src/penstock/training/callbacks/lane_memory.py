"""Lane memory: the memory that each lane of a pipeline holds."""

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


def lane_bytes(
    pipe: Pipeline, *, optimizers: Iterable[torch.optim.Optimizer] = (), timeline: Timeline | None = None
) -> tuple[int, ...]:
    """Return the memory of each lane, for all lanes; all processes call it, between steps.

    On a GPU, it is the peak memory of the device. On a CPU with lanes as processes, it is the current memory of the
    process. On a CPU with lanes as threads, it is the lane's parameters, gradients, buffers and optimizer state, plus
    the peak of saved values in a recorded step; shared memory counts for the first lane.
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
    """Return the memory that a lane holds between steps, plus gradients; tensors in `seen` do not count."""
    total = 0
    for s in pipe.schedule.stages_of(lane):
        held = stage_on(pipe.internals.chains, pipe.schedule, lane, s).held
        for tensor in (held.get(name) for name in held):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                total += _num_bytes(tensor) * (2 if tensor.requires_grad else 1) + state_of.get(id(tensor), 0)
    return total


def _states(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, int]:
    """Return the size of each parameter's optimizer state, by the parameter's id."""
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
    except (NotImplementedError, RuntimeError):  # sparse tensors have several storages
        return 0


def _resident_bytes() -> int:
    """Return the memory of this process: the current value if the system reports it, otherwise the peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
