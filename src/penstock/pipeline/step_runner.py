"""Step runner: begins, runs and ends every step of a pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import UsageError
from penstock.model.stages import Chain
from penstock.model.structure import rebuild
from penstock.pipeline.batch_reader import BatchReader, Ready
from penstock.pipeline.executor_setup import ExecutorSetup
from penstock.pipeline.graph_steps import GraphSteps
from penstock.pipeline.step_recording import Recording
from penstock.pipeline.weights import Weights
from penstock.runtime.batch_loss import BatchLoss
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.runtime.losses import LossFunction, SumReductionMode, read_loss, total_loss, total_metrics
from penstock.runtime.step import Mode, Step

if TYPE_CHECKING:
    from penstock.runtime.step import Watch

_SEED_LIMIT = 1 << 62
_MOST_PAST = 64  # steps; an update may consist of several


@dataclass(frozen=True)
class PastStep:
    """One past step: its number, the seed of its random numbers, its mode, the factor of its losses, and its sizes."""

    batch: int  # the id() of the user's batch
    number: int
    seed: int
    mode: Mode
    factor: torch.Tensor | None
    sizes: tuple[int, ...]  # samples of each micro-batch
    scale: float = 1.0  # the user's factor of the loss in the gradients


class PastSteps:
    """The last training steps."""

    def __init__(self) -> None:
        self._steps: deque[PastStep] = deque(maxlen=_MOST_PAST)

    def note(self, batch: object, step: Step) -> None:
        """Store a step, without its batch."""
        sizes = tuple(step.batch.sizes)
        self._steps.append(PastStep(id(batch), step.number, step.seed, step.mode, step.factor, sizes, step.scale))

    @property
    def last(self) -> PastStep | None:
        """The last step, finished or failed; None if there is none."""
        return self._steps[-1] if self._steps else None

    def find(self, batch: object) -> PastStep | None:
        """Return the last step with this batch object, or else the last step; None if there is none."""
        # the caller still holds the batch, so no later object has its id
        return next((past for past in reversed(self._steps) if past.batch == id(batch)), self.last)


@dataclass
class StepRunner:
    """The runner of all steps of a pipeline: it makes a step from a batch, runs it on the lanes, and ends it."""

    chain: Chain  # the stages, with the example and the structure of the results
    setup: ExecutorSetup  # the executors of the lanes
    lane_group: LaneGroup  # the lanes
    weights: Weights  # the parameters and gradients, including those that lanes share
    graphs: GraphSteps  # runs training steps as CUDA graphs if possible
    reader: BatchReader  # checks batches and cuts them into micro-batches
    loss: LossFunction | None  # the user's loss function
    scaler: torch.amp.GradScaler | None  # the user's GradScaler, if there is one
    loss_over_batch: bool  # whether one loss is computed on the outputs of all micro-batches
    watch: Watch | None = None  # an object that sees every action, if there is one
    recording: Recording | None = None  # the open recording, if there is one
    past: PastSteps = field(default_factory=PastSteps)  # the last training steps
    number: int = 0  # the number of the last step
    is_closed: bool = False  # whether the lanes are stopped

    # ---- begin

    def read(
        self, batch: object, target: tuple[Any, ...] | None, *, adds_gradients: bool = False,
        reader: BatchReader | None = None,
    ) -> Ready:  # fmt: skip
        """Check a batch and cut it into micro-batches; if this fails, report it to the other processes.

        Raises:
            UsageError: if the batch is not like the example, or if the pipeline is closed.
        """
        if self.is_closed:
            raise UsageError("the pipeline is closed; make another one")
        try:
            self.weights.check()
            return (reader or self.reader).read(batch, target, groups=self.weights.groups if adds_gradients else None)
        except Exception as error:
            self.number += 1
            self.lane_group.control.refuse(self.number, error)
            raise

    def begin(
        self, ready: Ready, mode: Mode, *, given: tuple[Any, ...] = (), outputs: dict[int, list[Any]] | None = None,
        scale: float = 1.0,
    ) -> Step:  # fmt: skip
        """Return the step for a batch.

        Args:
            ready: the batch in micro-batches.
            mode: how the stages run.
            given: the user's arguments, which are compared between processes.
            outputs: a dict that receives the model's results for each micro-batch; if given, no loss is computed.
            scale: the user's factor of the loss in the gradients.
        """
        shares, is_over_batch = ready.shares, self.loss_over_batch and outputs is None
        self.number += 1
        step = Step(
            self.number, ready.batch, mode, self._finish(ready, mode, outputs), ready.targets,
            [scale if is_over_batch else share * scale for share in shares], watch=self.watch, given=given, scale=scale,
        )  # fmt: skip
        if ready.total is not None:
            step.factor = 1 / ready.total
        if is_over_batch:
            step.over_batch = BatchLoss(
                ready.samples or ready.batch.sizes, self.chain.example.batch_dim, ready.target_dims,
                self._read_loss(mode),
            )  # fmt: skip
        step.measures_memory = self.recording is not None and self.recording.measures_memory
        if mode.is_training:
            step.seed = int(torch.randint(_SEED_LIMIT, (1,)).item())
        if self.scaler is not None and mode.is_training and mode.has_backward:
            # scale() instead of get_scale(), because the scaler creates its state in the first call of scale()
            factor = self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.setup.devices[0]))
            step.factor = factor if ready.total is None else factor / ready.total.to(factor.device)
        return step

    def _read_loss(self, mode: Mode) -> Callable[[Sequence[Any], tuple[Any, ...]], Any]:
        """Return a function from the model's results and a target to the loss and the metrics."""
        results, loss = self.chain.results(mode.is_training), self.loss
        return lambda tensors, target: read_loss(rebuild(results.template(), tensors), loss, target)

    def _finish(self, ready: Ready, mode: Mode, outputs: dict[int, list[Any]] | None) -> Callable[..., Any]:
        """Return the function that the last stage calls with the model's results for a micro-batch."""
        loss_of = self._read_loss(mode)

        def finish(
            tensors: Sequence[Any], mb: int, target: tuple[Any, ...]
        ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
            if outputs is not None:
                outputs[mb] = [tensor.detach() for tensor in tensors]
                return None, {}
            if ready.shares[mb] == 0:  # the micro-batch has no weight; its loss, a mean over nothing, would be NaN
                return sum((t.sum() * 0 for t in tensors if t.is_floating_point()), torch.zeros(())), {}
            with nullcontext() if ready.total is None else SumReductionMode():
                found: tuple[torch.Tensor, dict[str, torch.Tensor]] = loss_of(tensors, target)
                return found

        return finish

    # ---- run

    def run(self, step: Step, *, is_recorded: bool = True) -> None:
        """Run a step on the lanes."""
        executors = self.setup.executors(training=step.mode.is_training, has_backward=step.mode.has_backward)
        recording = self.recording if is_recorded else None
        spans = None
        if recording is not None:
            spans = recording.begin(step, self.setup.lowered(step.mode.is_training), executors)
        try:
            self.lane_group.run(executors, step, spans)
        finally:
            self.number = step.number  # after a failure, all processes continue from the latest step number
        if recording is not None:
            recording.end(self.lane_group, executors)

    def train(self, step: Step, batch: object) -> None:
        """Run a training step, as CUDA graphs if possible, and end it; `batch` is the user's batch object."""
        is_done = False
        try:
            with self.weights.summed_over_lanes(is_scaled=self.scaler is not None):
                self.graphs.run(step, self.run)
            is_done = True
        finally:
            self.past.note(batch, step)
            self._end(is_done=is_done)

    def run_untracked(self, step: Step, *, gathers: bool) -> None:
        """Run a training step without graphs, without a recording, and without an update of statistics.

        With `gathers`, sum the gradients of parameters that several lanes share.
        """
        try:
            with self.weights.summed_over_lanes(is_scaled=False) if gathers else nullcontext():
                self.run(step, is_recorded=False)
        finally:
            self._end(is_done=False)

    # ---- end

    def _end(self, *, is_done: bool) -> None:
        """End a training step: update statistics and shared buffers if it is done; otherwise discard the statistics."""
        self.setup.end_step(is_done=is_done)
        if is_done:
            self.weights.average_buffers()

    def total(self, step: Step, ready: Ready) -> torch.Tensor:
        """Return the loss of the batch, in all processes."""
        losses: Mapping[int, torch.Tensor] = self.lane_group.values.losses(step, self.setup.schedule)
        if step.over_batch is not None:
            (loss,) = losses.values()
            return loss.clone()
        is_updated_within = self.setup.schedule.versions is not None
        total = total_loss(losses, ready.shares, step.batch.sizes, is_updated_within=is_updated_within)
        return total if ready.total is None else total / ready.total.to(total.device, total.dtype)

    def total_metrics(self, step: Step, ready: Ready) -> dict[str, torch.Tensor]:
        """Return the metrics of the batch, which the lanes have exchanged together with their losses."""
        if step.over_batch is not None:
            return {name: value.double() for found in step.metrics.values() for name, value in found.items()}
        return total_metrics(step.metrics, ready.shares, is_sum=self.reader.is_sum)
