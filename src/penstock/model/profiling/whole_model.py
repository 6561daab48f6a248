"""Whole-model timing: the seconds of a whole model, to correct the times of its single nodes.

A node that is timed alone, again and again, finds its weights and its code in the nearest cache. Within a step it does
not: on a CPU, the nodes of a small model then take up to 1.5 times as long in total. The extra time of each node is
unknown, but the total time of all nodes can be measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.model.preserve import RandomStates, preserve_state
from penstock.model.structure import flatten

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured

_MOST_RUNS, _FEWEST_RUNS = 9, 3
_ENOUGH_SECONDS = 0.3
_MEMORY_SHARE = 0.25  # of the free memory; the largest share that one run may take


def whole_seconds(captured: Captured, *, batch_size: int | None, saved_bytes: float) -> tuple[float, float] | None:
    """Return the seconds of the forward and the backward of one micro-batch on the CPU; None if not measurable.

    Gradients, buffers, attributes and random generators are preserved.

    Args:
        captured: the model; all of it must be on the CPU.
        batch_size: the number of samples in a micro-batch; by default, that of the example.
        saved_bytes: the bytes that a forward keeps for the backward.
    """
    parameters = [p for p in captured.model.parameters() if p.requires_grad]
    if any(p._post_accumulate_grad_hooks for p in parameters):  # the user's hooks must not run here
        return None
    if saved_bytes + 2 * sum(p.nbytes for p in parameters) > _MEMORY_SHARE * _free_bytes():
        return None
    states = RandomStates()
    gradients = [(p, p.grad) for p in parameters]
    try:
        chain = captured.split(())
        call = captured.call if batch_size is None else captured.call.resized(batch_size)
        args, kwargs = call.map(lambda tensor: tensor.detach()).arguments()
        for parameter in parameters:  # add to existing gradients, as all micro-batches except the first do
            parameter.grad = torch.zeros_like(parameter)
        rows: list[tuple[float, float]] = []
        begin = time.perf_counter()
        with preserve_state(captured.model):
            while len(rows) < _MOST_RUNS:
                with torch.enable_grad():
                    rows.append(_run(lambda: chain(*args, **kwargs)))
                if len(rows) > _FEWEST_RUNS and time.perf_counter() - begin > _ENOUGH_SECONDS:
                    break
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # then the times of the nodes stay uncorrected
        return None
    finally:
        states.restore()
        for parameter, gradient in gradients:
            parameter.grad = gradient
    kept = rows[1:]  # the first run is slower: it allocates memory and selects kernels
    return statistics.median(row[0] for row in kept), statistics.median(row[1] for row in kept)


def _run(forward: Callable[[], object]) -> tuple[float, float]:
    begin = time.perf_counter()
    result = forward()
    middle = time.perf_counter()
    tensors, _ = flatten(result)
    ends = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    ones = [torch.ones_like(t) for t in ends]
    start = time.perf_counter()
    if ends:
        torch.autograd.backward(ends, ones)
    return middle - begin, time.perf_counter() - start


def _free_bytes() -> float:
    """Return the bytes of memory that a process can take without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE") / 2
    except (OSError, ValueError):
        return 0.0
