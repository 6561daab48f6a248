"""Reading: where a training is after a step. Summary: how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

__all__ = ["Reading", "Summary"]


@dataclass(frozen=True)
class Reading:
    """Where a training is after a step. Plain numbers: whoever is told of it need not wait for a device.

    Attributes:
        step: how many steps are done.
        steps: how many there will be.
        epoch: of the data, from 0.
        loss: of this step.
        gradient_norm: over all lanes, before clipping.
        lr: the learning rates of the optimizer's groups in this step.
        seconds: what the step took, the optimizer included.
        num_samples: in its batch.
        num_tokens: in its batch, where they are counted.
        timeline: of the last step that was recorded.
        lane_bytes: what each lane's device holds, where that is known.
        metrics: what the loss returned beside the loss, by name.
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
        """How many samples a second this step trained."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """How many tokens a second this step trained, where they are counted."""
        if self.num_tokens is None or not self.seconds:
            return None
        return self.num_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """Return what goes into a log: plain names and numbers."""
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
    """How a training ended.

    Attributes:
        status: "done", "data ended", "stopped" (a callback asked), "time" (all that was given), or a signal's name.
        step: the steps that are done, those before a resume counted in.
        steps: that were asked for.
        loss: of the last step; None where none was run.
        validation: the last validation loss, where there was one.
        seconds: of this run.
        folder: where everything is.
        resumed_from: the step of the checkpoint that it went on from; None where it started afresh.
        restarts: how often torchrun started the processes again; `seconds` are those since the last time.
        checkpoints: that are complete, the newest last.
        failures: of saves.
        timelines: the pages of recorded steps.
        skipped: steps whose update was skipped, for a loss or gradient that is not finite.
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
