"""Lane runs: let the check of a model run on the lanes, if only they have the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.model.example import Call, arguments_of
from penstock.model.stages import Chain


class LaneRuns(Chain):
    """A chain without stages of its own: a pipeline runs the calls, in evaluation mode and without gradients.

    A model on meta gets its weights in the lanes, and no process has all of them. The check of such a model does not
    perturb parameters and does not compare gradients.
    """

    def __init__(self, chain: Chain, example: object, run: Callable[[Call], Any]) -> None:
        vars(self).update(vars(chain))
        args, kwargs = arguments_of(example)
        self.stages, self.example = [], chain.read(*args, **kwargs)
        self._run_on_lanes = run

    def run(self, call: Call, run_stage: Any = None) -> Any:  # noqa: ANN401, ARG002 - as of a chain
        """Run a call as a single micro-batch; return the output of the model."""
        return self._run_on_lanes(call)
