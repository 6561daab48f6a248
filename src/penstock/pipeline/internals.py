"""Internals: the parts of a pipeline that checkpoints, faults, feeding and training use beside its public methods.

`pipe.internals` returns them. A test checks that no file outside `penstock.pipeline` reads a private attribute of a
pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.model.capture.capture import Captured
from penstock.model.stages import Chain, Stage
from penstock.pipeline.state_snapshot import preserved_state
from penstock.pipeline.step_runner import PastStep
from penstock.report.timeline import Timeline
from penstock.runtime.executor import Executor
from penstock.runtime.loss_weights import CountRule
from penstock.runtime.losses import LossFunction, Weight
from penstock.runtime.step import Mode, Step
from penstock.runtime.wiring import Wiring

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.runtime.lanes.lane_group import LaneGroup


class Internals:
    """The internal parts of a pipeline that other packages use."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    @property
    def group(self) -> LaneGroup:
        """The lane group: threads of this process, or processes."""
        return self._pipe._lane_group

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """Return the values that all processes passed, in the order of their lanes."""
        return self._pipe._lane_group.control.gather(thing)

    def fail(self, error: BaseException) -> None:
        """Report to the other processes an error that ends this process outside of a step."""
        self._pipe._lane_group.control.fail(error)

    @property
    def status_rows(self) -> Mapping[int, memoryview]:
        """The rows of the status board for the lanes of this process."""
        return self._pipe._lane_group.rows

    @property
    def captured(self) -> Captured:
        """The model as a graph."""
        return self._pipe._planned.captured

    def predicted(self) -> Timeline | None:
        """Return the predicted step; None if the model was not profiled."""
        return self._pipe._planned.predicted()

    @property
    def loss(self) -> LossFunction | None:
        """The loss function of the user."""
        return self._pipe._steps.loss

    @property
    def weight(self) -> Weight | CountRule:
        """What the loss averages over, as given or found; None for samples, and until it is found."""
        return self._pipe._steps.reader.weight

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The GradScaler, if there is one."""
        return self._pipe._steps.scaler

    @property
    def stages(self) -> list[Stage]:
        """The stages of the first chain. A bidirectional schedule has a second chain."""
        return self._pipe._chains[0].stages

    @property
    def chain(self) -> Chain:
        """The first chain: its stages, the example, and the structure of the results."""
        return self._pipe._chains[0]

    @property
    def chains(self) -> Sequence[Chain]:
        """The chains: one per way of the schedule."""
        return self._pipe._chains

    @property
    def keep(self) -> Sequence[str]:
        """The keep policy of each stage."""
        return self._pipe._steps.setup.keep

    @property
    def is_compiled(self) -> bool:
        """Whether Inductor compiles the stages."""
        return self._pipe._steps.setup.is_compiled

    def wiring(self) -> Wiring:
        """Return which values go from which stage to which, in the current mode."""
        return self._pipe._steps.setup.wiring(self._pipe.training)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers of the lanes in this process, under the model's own names."""
        yield from self._pipe._weights.held()

    def executors(self) -> Sequence[Executor]:
        """Return the executors of a training step on the lanes in this process."""
        return self._pipe._steps.setup.executors(training=True, has_backward=True)

    def past_step(self, batch: object) -> PastStep | None:
        """Return the past step that ran a batch, or else the last training step; None if there is none."""
        return self._pipe._steps.past.find(batch)

    def rerun_step(self, batch: object, target: tuple[Any, ...], prepare: Callable[[Step], None]) -> None:
        """Run the past training step of a batch again; the model and its gradients do not change.

        Args:
            batch: the same object that the past step got.
            target: a tuple with the target, or an empty tuple.
            prepare: called with the step before it runs, for example to set its watch.
        """
        pipe, past = self._pipe, self.past_step(batch)
        has_backward = pipe.schedule.versions is None
        with preserved_state(pipe):
            steps = pipe._steps
            ready = steps.read(batch, target, adds_gradients=True)
            mode = Mode(True, has_backward) if past is None else replace(past.mode, has_backward=has_backward)
            step = steps.begin(ready, mode, scale=1.0 if past is None else past.scale)
            if past is not None:
                step.seed, step.factor = past.seed, past.factor
            prepare(step)
            steps.run_untracked(step, gathers=False)
