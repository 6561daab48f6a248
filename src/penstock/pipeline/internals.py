"""Internals: what checkpoints, faults, feeding and training need of a pipeline beside its public methods.

This is the whole of it: no file outside `penstock.pipeline` reads a private attribute of a pipeline, and a test holds
that. A pipeline offers it as `pipe.internals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from penstock.model.capture.capture import Captured
from penstock.model.stages import Chain, Stage
from penstock.pipeline.past_steps import PastStep
from penstock.pipeline.state_snapshot import preserved_state
from penstock.report.timeline import Timeline
from penstock.runtime.executor import Executor
from penstock.runtime.losses import LossFunction
from penstock.runtime.step import Mode, Step
from penstock.runtime.wiring import Wiring

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline
    from penstock.runtime.lanes.lane_group import LaneGroup

__all__ = ["Internals"]


class Internals:
    """The inside of a pipeline, as far as others need it.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    @property
    def group(self) -> LaneGroup:
        """The lanes: threads of this process, or processes."""
        return self._pipe._lane_group

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what each process gave, in the order of their lanes."""
        return self._pipe._lane_group.control.gather(thing)

    def fail(self, error: BaseException) -> None:
        """Tell the other processes of what ends this one outside of a step."""
        self._pipe._lane_group.control.fail(error)

    @property
    def status_rows(self) -> Mapping[int, memoryview]:
        """Where the lanes of this process say what they are doing."""
        return self._pipe._lane_group.rows

    @property
    def captured(self) -> Captured:
        """The model as a graph."""
        return self._pipe._planned.captured

    def predicted(self) -> Timeline | None:
        """Return the predicted step, where the model was profiled."""
        return self._pipe._planned.predicted()

    @property
    def loss(self) -> LossFunction | None:
        """The user's loss."""
        return self._pipe._steps.loss

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales losses of 16 bits."""
        return self._pipe._steps.scaler

    @property
    def stages(self) -> list[Stage]:
        """The stages of the model's first copy: a bidirectional schedule has another."""
        return self._pipe._chains[0].stages

    @property
    def chain(self) -> Chain:
        """The same, with what the model is called with and returns."""
        return self._pipe._chains[0]

    @property
    def chains(self) -> Sequence[Chain]:
        """The model's copies: one, and a second where the schedule is bidirectional."""
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
        """Return which values go from which stage to which, in the mode that the pipeline is in."""
        return self._pipe._steps.setup.wiring(self._pipe.training)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters and buffers of the lanes that run here, by the model's own names."""
        yield from self._pipe._weights.held()

    def executors(self) -> Sequence[Executor]:
        """Return what runs a training step on the lanes here."""
        return self._pipe._steps.setup.executors(training=True, has_backward=True)

    def past_step(self, batch: object) -> PastStep | None:
        """Return how a batch was run in one of the last training steps; None where it was not."""
        return self._pipe._steps.past.find(batch)

    def rerun_step(self, batch: object, target: tuple[Any, ...], prepare: Callable[[Step], None]) -> None:
        """Run the training step of a batch once more, as it was run; nothing of the model or its gradients changes.

        Args:
            batch: the very one that the step was given.
            target: nothing, or one thing.
            prepare: called with the step before it is run, as to watch it.
        """
        pipe, past = self._pipe, self.past_step(batch)
        has_backward = pipe.schedule.versions is None
        with preserved_state(pipe):
            steps = pipe._steps
            ready = steps.read(batch, target, adds_gradients=True)
            mode = Mode(True, has_backward) if past is None else replace(past.mode, has_backward=has_backward)
            step = steps.begin(ready, mode)
            if past is not None:
                step.seed, step.factor = past.seed, past.factor
            prepare(step)
            steps.rehearse(step, gathers=False)
