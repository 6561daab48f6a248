"""Measure: the profile of a captured model from timings on the device that it will run on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.devices.kinds import kind_of
from penstock.errors import UsageError
from penstock.model.profile import Profile
from penstock.model.profiling.call_timing import Call, Clock, Timing, clock_for, engine_overhead, in_queue, median_time
from penstock.model.profiling.node_survey import Progress, distinct_nodes, survey
from penstock.model.profiling.node_trial import Backward, Trial
from penstock.model.profiling.whole_model import whole_seconds

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured

__all__ = ["measure"]

_MOST_SECONDS = 0.01  # for one timing; more does not make a median better
_TIMINGS = 4  # of a node: forward, and the gradient of its inputs, of its parameters and of both
_MOST_SCALE = 3.0  # beyond that something else was measured
_NOTHING = Timing(0.0)

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
    """Return what each node takes on a device, measured in one pass over the model.

    Each kind of node is warmed up and timed once, however often it occurs: forward, input gradient and weight gradient,
    the latter with the addition to `.grad` that all micro-batches but the first make. Input and weight gradient are
    scaled so that together they take what one full backward of the node takes. What a call of the autograd engine costs
    by itself is taken off, for a stage pays it once, not once a node. On a CPU, where a node that is timed by itself
    finds all it needs in the cache, forwards and backwards are then scaled so that together they take what the model
    takes in one piece, where memory allows that. The model, its buffers and gradients and the random generators stay as
    they are.

    Args:
        captured: the model.
        device: where to measure; by default where the model is.
        batch_size: the samples of a micro-batch; by default those of the example.
        repeats: bursts of which a timing is the median, at most.
        seconds_budget: for all timings together, about; the one pass over the model comes on top.
        progress: is told nodes done, nodes in all and a node's name.

    Raises:
        UsageError: when an argument cannot be right, or there is nothing to measure on.
    """
    if repeats < 1 or not seconds_budget > 0:
        raise UsageError(f"repeats: {repeats} and seconds_budget: {seconds_budget} must be positive")
    where = None if device is None else torch.device(device)
    _check_device(where)
    seconds = min(_MOST_SECONDS, seconds_budget / _TIMINGS / max(1, distinct_nodes(captured.graph)))
    stopwatch = _Stopwatch(where, repeats=repeats, seconds=seconds)
    with warnings.catch_warnings():  # torch's remark about its own first product in a thread of the autograd engine
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        result = survey(captured, stopwatch, device=where, batch_size=batch_size, progress=progress)
    forward = in_queue([times.forward for times in result.found])
    backward = in_queue([times.backward for times in reversed(result.found)])[::-1]
    share = np.array([times.weight_share for times in result.found])
    per_node = result.sums(forward, np.array(backward) * (1 - share), np.array(backward) * share)
    if _is_on_cpu(captured, stopwatch.device):
        whole = whole_seconds(captured, batch_size=batch_size, saved_bytes=float(per_node[3].sum()))
        per_node[:3] = _put_right(per_node[:3], whole)
    return Profile(
        graph=captured.graph,
        batch_size=captured.graph.batch_size if batch_size is None else batch_size,
        forward=per_node[0],
        input_grad=per_node[1],
        weight_grad=per_node[2],
        saved_bytes=per_node[3],
        pending_bytes=per_node[4],
        device=_describe(stopwatch.device),
        method="measured",
    )


@dataclass(frozen=True)
class _Times:
    """What a node takes; `weight_share` is the part of its backward that its parameters take."""

    forward: Timing
    backward: Timing = _NOTHING
    weight_share: float = 0.0


class _Stopwatch:
    """The examiner that times."""

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
        """Return a plain forward's time, and as much again for each gradient."""
        self._start(trial)
        num_inputs, num_weights = bool(trial.wanted_inputs), bool(trial.wanted_parameters)
        num = num_inputs + num_weights
        return _Times(Timing(seconds), Timing(seconds * num), num_weights / num if num else 0.0)

    def _start(self, trial: Trial) -> None:
        """Set the clock to the device of the first tensor that comes by, if none was given."""
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
        """Time the gradient of some tensors; that of parameters is added to what is there."""
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


def _put_right(columns: list[_Floats], whole: tuple[float, float] | None) -> list[_Floats]:
    """Return forward, input and weight gradients of nodes such that together they take what the model takes."""
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
        raise UsageError("device: meta has nothing to measure; give another device, or take the analytic profile")


def _describe(device: torch.device | None) -> str:
    device = torch.device("cpu") if device is None else device
    return f"{device.type} {kind_of(device).name(device)}"
