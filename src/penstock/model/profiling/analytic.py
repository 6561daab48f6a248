"""Analytic profile: the costs of a captured model from counts of operations and bytes; it needs no device or memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from penstock.errors import CaptureError
from penstock.model.profile import Profile
from penstock.model.profiling.device_rates import Rates
from penstock.model.profiling.node_survey import Progress, survey
from penstock.model.profiling.node_trial import Backward, Trial
from penstock.model.profiling.operation_counts import FusedAttention, Tally
from penstock.model.profiling.saved_tensors import num_bytes

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured


def analytic(
    captured: Captured, *, rates: Rates | str = "cpu", batch_size: int | None = None, progress: Progress | None = None
) -> Profile:
    """Return the costs of each node, computed from its operations and bytes; the device need not be present.

    The model runs once on meta tensors, which have shapes but no memory, so it may be larger than any machine. The time
    of an operation is the longer of its arithmetic and its memory traffic, plus one launch. Views take no time. The
    weight gradient includes the addition to `.grad`. Attention counts as a fused kernel. Input and weight gradient are
    scaled so that their sum is the time of one full backward, as in `measure`.

    Args:
        captured: the model; it may be on "meta".
        rates: the rates of the device, or the name of a known device.
        batch_size: the number of samples in a micro-batch; by default, that of the example.
        progress: called with the number of examined nodes, the number of all nodes, and the name of the node.

    Raises:
        UsageError: if an argument is invalid.
    """
    chosen = Rates.of(rates) if isinstance(rates, str) else rates
    count = partial(survey, captured, _Counter(chosen), batch_size=batch_size, progress=progress)
    with FusedAttention():
        try:
            result = count(device=torch.device("meta"))
        except CaptureError:  # the model reads data: count on the example itself, if it has data
            if all(tensor.is_meta for tensor in captured.call.tensors):
                raise
            result = count(device=None)
    return result.profile(result.sums(*np.array(result.found).reshape(-1, 3).T), device=chosen.name, method="analytic")


class _Cost(NamedTuple):
    forward: float
    input_grad: float = 0.0
    weight_grad: float = 0.0


class _Counter:
    """An examiner that counts operations and bytes."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates

    def examine(self, trial: Trial) -> _Cost:
        forward = self._seconds(trial.forward)
        backward = trial.backward()
        if backward is None:
            return _Cost(forward)
        inputs = self._gradient(backward, trial.wanted_inputs, [])
        weights = self._gradient(backward, [], trial.wanted_parameters)
        if not inputs or not weights:
            return _Cost(forward, inputs, weights)
        scale = self._gradient(backward, trial.wanted_inputs, trial.wanted_parameters) / (inputs + weights)
        return _Cost(forward, inputs * scale, weights * scale)

    def guess(self, trial: Trial, seconds: float) -> _Cost:  # noqa: ARG002 - a count needs no measured time
        moved = sum(num_bytes(tensor) for tensor in (*trial.inputs, *trial.parameters))
        once = self.rates.seconds(flops=0.0, num_bytes=moved)
        return _Cost(once, once * bool(trial.wanted_inputs), once * bool(trial.wanted_parameters))

    def _seconds(self, call: Callable[[], object]) -> float:
        with Tally(self.rates) as tally:
            call()
        return float(tally.seconds)

    def _gradient(self, backward: Backward, inputs: list[torch.Tensor], parameters: list[torch.Tensor]) -> float:
        if not inputs and not parameters:
            return 0.0
        # adding a gradient takes two reads and one write
        added = sum(self.rates.seconds(flops=0.0, num_bytes=3 * num_bytes(tensor)) for tensor in parameters)
        return self._seconds(lambda: backward.gradient([*inputs, *parameters])) + added
