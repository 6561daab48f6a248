"""Step runner: where every step of a pipeline begins, and where it ends."""

from __future__ import annotations

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
from penstock.pipeline.past_steps import PastSteps
from penstock.pipeline.step_recording import Recording
from penstock.pipeline.weights import Weights
from penstock.runtime.batch_loss import BatchLoss
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.runtime.losses import LossFunction, Summing, read_loss, total_loss, total_metrics
from penstock.runtime.step import Mode, Step

if TYPE_CHECKING:
    from penstock.runtime.action_watch import Watch

__all__ = ["StepRunner"]

_MAKES_SEED = 1 << 62


@dataclass
class StepRunner:
    """Makes steps of batches, runs them on the lanes, and ends them.

    Attributes:
        chain: the stages, with what the model is called with and returns.
        setup: the executors and what does not change from step to step.
        lane_group: the lanes.
        weights: parameters and gradients, which lanes may share.
        graphs: runs training steps as CUDA graphs if it can.
        reader: reads batches.
        loss: the user's.
        scaler: scales losses of 16 bits.
        loss_over_batch: one loss is computed of all micro-batches.
        watch: sees every action, if there is one.
        recording: measures the steps, if there is one.
        past: how the last training steps ran.
        number: of the last step.
        is_closed: the lanes are stopped.
    """

    chain: Chain
    setup: ExecutorSetup
    lane_group: LaneGroup
    weights: Weights
    graphs: GraphSteps
    reader: BatchReader
    loss: LossFunction | None
    scaler: torch.amp.GradScaler | None
    loss_over_batch: bool
    watch: Watch | None = None
    recording: Recording | None = None
    past: PastSteps = field(default_factory=PastSteps)
    number: int = 0
    is_closed: bool = False

    # ---- begin

    def read(
        self, batch: object, target: tuple[Any, ...] | None, *, adds_gradients: bool = False,
        reader: BatchReader | None = None,
    ) -> Ready:  # fmt: skip
        """Return a batch that can run; tell the other processes if this one cannot.

        Raises:
            UsageError: when it is not like the example.
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
        self, ready: Ready, mode: Mode, *, given: tuple[Any, ...] = (), outputs: dict[int, list[Any]] | None = None
    ) -> Step:
        """Return a step for a batch.

        Args:
            ready: the batch.
            mode: how to run.
            given: what the user gave, to be compared between processes.
            outputs: is filled with the model's results for each micro-batch; no loss is computed then.
        """
        shares, is_over_batch = ready.shares, self.loss_over_batch and outputs is None
        self.number += 1
        step = Step(
            self.number, ready.batch, mode, self._finish(ready, mode, outputs), ready.targets,
            [1.0] * len(shares) if is_over_batch else shares, watch=self.watch, given=given,
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
            step.seed = int(torch.randint(_MAKES_SEED, (1,)).item())
        if self.scaler is not None and mode.is_training and mode.has_backward:
            # scale() rather than get_scale(): the scaler makes what it needs in its first call
            factor = self.scaler.scale(torch.ones((), dtype=torch.float64, device=self.setup.devices[0]))
            step.factor = factor if ready.total is None else factor / ready.total.to(factor.device)
        return step

    def _read_loss(self, mode: Mode) -> Callable[[Sequence[Any], tuple[Any, ...]], Any]:
        """Return what makes the loss, and the numbers beside it, of the model's results and a target."""
        results, loss = self.chain.results(mode.is_training), self.loss
        return lambda tensors, target: read_loss(rebuild(results.template(), tensors), loss, target)

    def _finish(self, ready: Ready, mode: Mode, outputs: dict[int, list[Any]] | None) -> Callable[..., Any]:
        """Return what the last stage does with the model's results for a micro-batch."""
        loss_of = self._read_loss(mode)

        def finish(
            tensors: Sequence[Any], mb: int, target: tuple[Any, ...]
        ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
            if outputs is not None:
                outputs[mb] = [tensor.detach() for tensor in tensors]
                return None, {}
            if ready.shares[mb] == 0:  # nothing counts, and a mean over nothing is not a number
                return sum((t.sum() * 0 for t in tensors if t.is_floating_point()), torch.zeros(())), {}
            with nullcontext() if ready.total is None else Summing():
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
            self.number = step.number  # processes that failed at different steps have agreed on the latest
        if recording is not None:
            recording.end(self.lane_group, executors)

    def train(self, step: Step, batch: object) -> None:
        """Run a training step, as graphs if that works, and end it; `batch` is what the user gave."""
        is_done = False
        try:
            with self.weights.summed_over_lanes(is_scaled=self.scaler is not None):
                self.graphs.run(step, self.run)
            is_done = True
        finally:
            self.past.note(batch, step)
            self._end(is_done=is_done)

    def rehearse(self, step: Step, *, gathers: bool) -> None:
        """Run a training step that does not count: no graphs, no record, no statistics.

        Args:
            step: the step.
            gathers: gradients of parameters that lanes share are summed.
        """
        try:
            with self.weights.summed_over_lanes(is_scaled=False) if gathers else nullcontext():
                self.run(step, is_recorded=False)
        finally:
            self._end(is_done=False)

    # ---- end

    def _end(self, *, is_done: bool) -> None:
        """End a training step: lanes agree on statistics and buffers if it counts, and forget statistics if not."""
        self.setup.end_step(self.lane_group, is_done=is_done)
        if is_done:
            self.weights.average_buffers()

    def total(self, step: Step, ready: Ready) -> torch.Tensor:
        """Return the loss of the batch; all lanes get it."""
        losses: Mapping[int, torch.Tensor] = self.lane_group.values.losses(step, self.setup.schedule)
        if step.over_batch is not None:
            (loss,) = losses.values()
            return loss.clone()
        is_updated_within = self.setup.schedule.versions is not None
        total = total_loss(losses, ready.shares, step.batch.sizes, is_updated_within=is_updated_within)
        return total if ready.total is None else total / ready.total.to(total.device, total.dtype)

    def total_metrics(self, step: Step, ready: Ready) -> dict[str, torch.Tensor]:
        """Return the metrics of the batch; all lanes have told them with their losses."""
        if step.over_batch is not None:
            return {name: value.double() for found in step.metrics.values() for name, value in found.items()}
        return total_metrics(step.metrics, ready.shares, is_sum=self.reader.is_sum)
