"""Progress: `Reading`, the state of a training after a step, and `Summary`, its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline


@dataclass(frozen=True)
class Reading:
    """The state of a training after a step. All values are plain numbers, so nothing waits for a device.

    Attributes:
        step: the number of completed steps.
        steps: the number of all steps.
        epoch: the epoch of the data, counted from 0.
        loss: the loss of this step.
        gradient_norm: over all lanes, before clipping.
        lr: the learning rates of the optimizer's groups in this step.
        seconds: the time of the step, including the optimizer.
        num_samples: the number of samples in its batch.
        num_tokens: the number of tokens in its batch, if they are counted.
        timeline: the timeline of the last recorded step.
        lane_bytes: the memory of each lane, if it is known.
        metrics: the additional results of the loss, by name.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    gradient_norm: float
    lr: tuple[float, ...]
    seconds: float
    num_samples: int
    num_tokens: int | None = None
    timeline: Timeline | None = None
    lane_bytes: tuple[int, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """The samples per second of this step."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens per second of this step, if they are counted."""
        if self.num_tokens is None or not self.seconds:
            return None
        return self.num_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """Return the figures for a log as plain names and numbers."""
        found: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "gradient_norm": self.gradient_norm,
            "lr": self.lr[0] if len(self.lr) == 1 else list(self.lr),
            "step_seconds": self.seconds,
            "samples_per_second": self.samples_per_second,
        }
        if self.tokens_per_second is not None:
            found["tokens_per_second"] = self.tokens_per_second
        if self.timeline is not None:
            found["bubble"] = self.timeline.bubble
        if self.lane_bytes:
            found["lane_bytes"] = list(self.lane_bytes)
        if self.metrics:
            found["metrics"] = dict(self.metrics)
        return found


@dataclass(frozen=True)
class Summary:
    """The result of a training.

    Attributes:
        status: "done", "data ended", "stopped" (by a callback), "time" (after `max_seconds`), or the name of a signal.
        step: the number of completed steps, including those before a resume.
        steps: the number of requested steps.
        loss: the loss of the last step; None if no step ran.
        validation: the last validation loss, if any.
        seconds: the time of this run.
        folder: the run folder.
        resumed_from: the step of the checkpoint that it resumed from; None if it started anew.
        restarts: the number of restarts by torchrun; `seconds` counts from the last one.
        checkpoints: the complete checkpoints, the newest last.
        failures: messages of failed saves.
        timelines: the pages of recorded steps.
        skipped: steps whose update was skipped because a loss or gradient was not finite.
    """

    status: str
    step: int
    steps: int
    loss: float | None
    validation: float | None
    seconds: float
    folder: Path
    resumed_from: int | None = None
    restarts: int = 0
    checkpoints: tuple[Path, ...] = ()
    failures: tuple[str, ...] = ()
    timelines: tuple[Path, ...] = ()
    skipped: tuple[int, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all steps were run."""
        return self.status == "done"
