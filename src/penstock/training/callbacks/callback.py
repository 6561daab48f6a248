"""Callback: the base class of objects that are notified of events in a training, and the figures that they get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, error_in_short, warn_user

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline
    from penstock.training.trainer import Trainer


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


class Callback:
    """Notified of events in a training; override the methods you need.

    Under torchrun, each process notifies its own callbacks of the same events; `trainer.is_first` is True in the
    process that should write output. An exception in a callback causes a warning, once per place, and the training
    continues. Set `strict = True` to let an exception end the training.
    """

    strict = False

    def on_train_begin(self, trainer: Trainer) -> None:
        """The training starts; a checkpoint, if any, is loaded: `trainer.step`."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """A step begins; its batch is requested next."""

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """Gradients are complete and clipped; the weights have not changed yet."""

    def on_step_end(self, trainer: Trainer, reading: Reading) -> None:
        """A step is done, including its update."""

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Every `log_every` steps: the figures of the step, and means since the last log."""

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """A validation is done."""

    def on_record(self, trainer: Trainer, page: Path) -> None:
        """The timeline of a step was written."""

    def on_save(self, trainer: Trainer, step: int, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_fault(self, trainer: Trainer, fault: Mapping[str, Any]) -> None:
        """A fault occurred; the training continues, or is about to end with an error."""

    def on_recover(self, trainer: Trainer, step: int) -> None:
        """The training continues from a checkpoint."""

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """The training is done and saved."""

    def close(self) -> None:
        """The training has ended, for any reason: release files and terminals."""


class Callbacks:
    """Several callbacks, called one after the other."""

    def __init__(self, given: Iterable[Callback]) -> None:
        self._all = list(given)
        wrong = [one for one in self._all if not isinstance(one, Callback)]
        if wrong:
            raise UsageError(f"callbacks: expected penstock.Callback objects; given: {type(wrong[0]).__name__}")
        self._warned: set[tuple[int, str]] = set()

    def notify(self, name: str, trainer: Trainer, *what: Any) -> None:  # noqa: ANN401 - the method's arguments
        """Call a method of each callback."""
        for callback in self._all:
            method = getattr(callback, name)
            if getattr(type(callback), name) is getattr(Callback, name):
                continue
            try:
                method(trainer, *what)
            except Exception as error:
                if callback.strict:
                    raise
                if (id(callback), name) not in self._warned:
                    self._warned.add((id(callback), name))
                    warn_user(
                        f"{type(callback).__name__}.{name} raised {error_in_short(error)}; the training continues. "
                        "This warning appears once. Set strict = True in the callback to end the training instead"
                    )

    def close(self) -> None:
        """Close all callbacks; ignore errors."""
        for callback in self._all:
            with suppress(Exception):
                callback.close()
