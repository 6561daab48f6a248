"""Measured profile: the costs of a captured model from timings on the device that will run it."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.devices import cuda
from penstock.devices.kinds import kind_of
from penstock.errors import UsageError
from penstock.model.parameters import main_device
from penstock.model.preserve import RandomStates, preserve_state
from penstock.model.profile import Profile
from penstock.model.profiling.call_timing import Call, Clock, Timing, clock_for, engine_overhead, in_queue, median_time
from penstock.model.profiling.node_survey import Progress, distinct_nodes, survey
from penstock.model.profiling.node_trial import Backward, Trial
from penstock.model.structure import flatten

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured

_MOST_SECONDS = 0.01  # for one timing; a longer one does not improve the median
_TIMINGS = 4  # per node: its forward, and the gradients of its inputs, of its parameters and of both
_MOST_SCALE = 3.0  # a larger factor means that something else was measured
_NOTHING = Timing(0.0)
_MOST_RUNS, _FEWEST_RUNS = 9, 3  # of the whole model
_ENOUGH_SECONDS = 0.3
_MEMORY_SHARE = 0.25  # of the free memory; the largest share that one run may take

_Floats = NDArray[np.float64]


def measure(
    captured: Captured,
    *,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
    repeats: int = 7,
    seconds_budget: float = 5.0,
    progress: Progress | None = None,
) -> Profile:
    """Return the costs of each node on a device, measured in one pass over the model.

    Each kind of node is warmed up and timed once, even if it occurs many times: its forward, its input gradient and its
    weight gradient. The weight gradient includes the addition to `.grad`, which all micro-batches except the first
    make. Input and weight gradient are scaled so that their sum is the time of one full backward of the node. The
    overhead of a call of the autograd engine is subtracted, since a stage pays it once, not once per node.

    On a CPU, a node that is timed alone finds all its data in the cache. So forwards and backwards are then scaled so
    that their sums are the times of the whole model, if there is enough memory to measure these. The model, its buffers
    and gradients and the random generators are left unchanged.

    Args:
        captured: the model.
        device: the device to measure on; by default, the device of the model; for a model on
            meta, a GPU if there is one.
        batch_size: the number of samples in a micro-batch; by default, that of the example.
        repeats: the maximum number of bursts per timing; the timing is their median.
        seconds_budget: the approximate time for all timings; the pass over the model takes additional time.
        progress: called with the number of examined nodes, the number of all nodes, and the name of the node.

    Raises:
        UsageError: if an argument is invalid, or the device is meta.
    """
    if repeats < 1 or not seconds_budget > 0:
        raise UsageError(f"repeats: {repeats} and seconds_budget: {seconds_budget} must be positive")
    where = None if device is None else torch.device(device)
    _check_device(where)
    if where is None and main_device(captured.model, captured.call).type == "meta":
        where = torch.device("cuda" if cuda.has_gpu() else "cpu")
    seconds = min(_MOST_SECONDS, seconds_budget / _TIMINGS / max(1, distinct_nodes(captured.graph)))
    stopwatch = _Stopwatch(where, repeats=repeats, seconds=seconds)
    with warnings.catch_warnings():  # torch's warning about its first product in a thread of the autograd engine
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        result = survey(captured, stopwatch, device=where, batch_size=batch_size, progress=progress)
    forward = in_queue([times.forward for times in result.found])
    backward = in_queue([times.backward for times in reversed(result.found)])[::-1]
    share = np.array([times.weight_share for times in result.found])
    per_node = result.sums(forward, np.array(backward) * (1 - share), np.array(backward) * share)
    if _is_on_cpu(captured, stopwatch.device):
        whole = whole_seconds(captured, batch_size=batch_size, saved_bytes=float(per_node[3].sum()))
        per_node[:3] = _scale_to_whole(per_node[:3], whole)
    return result.profile(per_node, device=_describe(stopwatch.device), method="measured")


@dataclass(frozen=True)
class _Times:
    """The times of a node; `weight_share` is the share of its weight gradient in its backward."""

    forward: Timing
    backward: Timing = _NOTHING
    weight_share: float = 0.0


class _Stopwatch:
    """An examiner that times nodes."""

    def __init__(self, device: torch.device | None, *, repeats: int, seconds: float) -> None:
        self.device = device
        self.repeats, self.seconds = repeats, seconds
        self._clock: Clock | None = None
        self._overhead = _NOTHING

    def examine(self, trial: Trial) -> _Times:
        self._start(trial)
        with torch.enable_grad():
            forward = self._time(trial.call, is_reusable=not trial.writes_inputs)
        backward = trial.backward()
        if backward is None:
            return _Times(forward)
        return self._with_backward(trial, forward, backward)

    def _with_backward(self, trial: Trial, forward: Timing, backward: Backward) -> _Times:
        inputs = self._gradient(backward, trial.wanted_inputs, [])
        weights = self._gradient(backward, [], trial.wanted_parameters)
        if not trial.wanted_inputs or not trial.wanted_parameters:
            return _Times(forward, inputs or weights or _NOTHING, 0.0 if inputs else 1.0)
        both = self._gradient(backward, trial.wanted_inputs, trial.wanted_parameters)
        parts = [timing.longer if timing else 0.0 for timing in (inputs, weights)]
        return _Times(forward, both or _NOTHING, parts[1] / sum(parts) if sum(parts) else 0.0)

    def guess(self, trial: Trial, seconds: float) -> _Times:
        """Return the time of a plain forward, and the same time for each gradient."""
        self._start(trial)
        num_inputs, num_weights = bool(trial.wanted_inputs), bool(trial.wanted_parameters)
        num = num_inputs + num_weights
        return _Times(Timing(seconds), Timing(seconds * num), num_weights / num if num else 0.0)

    def _start(self, trial: Trial) -> None:
        """Make the clock, for the device of the first tensor if none was given."""
        if self._clock is not None:
            return
        tensors = [*trial.inputs, *trial.parameters, *trial.forward()]
        self.device = self.device or next((tensor.device for tensor in tensors), torch.device("cpu"))
        _check_device(self.device)
        self._clock = clock_for(self.device)
        self._overhead = engine_overhead(self._clock, self.device)

    def _time(self, make: Callable[[], Call], *, is_reusable: bool = True) -> Timing:
        assert self._clock is not None
        return median_time(self._clock, make, is_reusable=is_reusable, repeats=self.repeats, seconds=self.seconds)

    def _gradient(
        self, backward: Backward, inputs: list[torch.Tensor], parameters: list[torch.Tensor]
    ) -> Timing | None:
        """Time the gradients of some tensors; those of parameters are added to existing gradients."""
        if not inputs and not parameters:
            return None
        wanted = [*inputs, *parameters]
        sums = [torch.zeros_like(tensor) for tensor in parameters]

        def call() -> None:
            grads = backward.gradient(wanted)
            for total, grad in zip(sums, grads[len(inputs) :], strict=True):
                if grad is not None:
                    total.add_(grad)

        with torch.no_grad():
            call()
            return self._time(lambda: call).less(self._overhead)


def _is_on_cpu(captured: Captured, device: torch.device | None) -> bool:
    here = torch.device("cpu")
    tensors = (*captured.model.parameters(), *captured.model.buffers(), *captured.call.tensors)
    return device == here and all(tensor.device == here for tensor in tensors)


def _scale_to_whole(columns: list[_Floats], whole: tuple[float, float] | None) -> list[_Floats]:
    """Return the times of all nodes, scaled so that their sums are the times of the whole model."""
    forward, *backward = columns
    if whole is None:
        return columns
    parts = [float(forward.sum()), float(sum(column.sum() for column in backward))]
    scales = [
        min(_MOST_SCALE, max(1 / _MOST_SCALE, all_of_it / part)) if part > 0 and all_of_it > 0 else 1.0
        for all_of_it, part in zip(whole, parts, strict=True)
    ]
    return [forward * scales[0], *(column * scales[1] for column in backward)]


def _check_device(device: torch.device | None) -> None:
    if device is not None and device.type == "meta":
        raise UsageError(
            "device: nothing runs on meta, so it cannot be measured; pass another device, or use the analytic profile"
        )


def _describe(device: torch.device | None) -> str:
    device = torch.device("cpu") if device is None else device
    return f"{device.type} {kind_of(device).name(device)}"


# ---- the seconds of a whole model, to correct the times of its single nodes


def whole_seconds(captured: Captured, *, batch_size: int | None, saved_bytes: float) -> tuple[float, float] | None:
    """Return the seconds of the forward and the backward of one micro-batch on the CPU; None if not measurable.

    A node that is timed alone, again and again, finds its weights and its code in the nearest cache. Within a step it
    does not: on a CPU, the nodes of a small model then take up to 1.5 times as long in total. The extra time of each
    node is unknown, but the total time of all nodes can be measured. Gradients, buffers, attributes and random
    generators are preserved. All of the model must be on the CPU.
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
