"""Trainer: a training loop that resumes, logs, validates, saves, and ends cleanly on a signal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.checkpoint import Checkpoints, Restored
from penstock.deciding.plan import NAME
from penstock.errors import NonFiniteError, UsageError, warn_user
from penstock.feeding.feed import Feed, feed
from penstock.feeding.item_carrier import Split
from penstock.feeding.sharded_loaders import check_not_sharded
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.planned.placement import threads_per_lane, with_threads
from penstock.torchrun import attempt
from penstock.training.callbacks.callback import Callback, Callbacks, Reading, Summary
from penstock.training.callbacks.journal import Journal
from penstock.training.callbacks.lane_memory import lane_bytes
from penstock.training.data_watch import DataWatch
from penstock.training.fault_handling import FaultHandler, MemoryRetry
from penstock.training.resume.resuming import DataPosition, resume
from penstock.training.resume.run_folder import RunFolder
from penstock.training.signals import Signals
from penstock.training.stepper import ItemReader, Stepper, UpdateResult, validate
from penstock.training.trainer_options import TrainerOptions
from penstock.training.view.view import View

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

_MOST_REWINDS = 5  # per run; after more, the data is not the cause


class Trainer:
    """Trains a pipeline for some steps, and keeps all results in a folder.

    Compared with your own loop, it resumes from the last checkpoint in the folder, saves while training continues,
    logs, validates, records timelines, ends with a checkpoint on a signal (SIGTERM, Ctrl-C), and stops before a
    non-finite loss reaches the weights.

    Args:
        pipe: the pipeline.
        optimizer: made from `pipe.parameters()`; None for schedules that update weights within the step.
        data: the batches for `pipe.step`: a DataLoader, a feed, or any iterable that can be iterated over again for
            each epoch; each item is (batch, target), or a batch alone if the model computes its loss.
        steps: the number of updates, including those before a resume.
        folder: the folder for all results; only one training at a time can use it.
        scheduler: one or several learning-rate schedulers; each steps after each update, ReduceLROnPlateau after each
            validation.
        scaler: the pipeline's GradScaler; optional, since the pipeline already knows it.
        validation: the batches for validation.
        validate_every: steps between validations; 0: only at the end.
        clip: the maximum norm of all gradients.
        accumulate: the number of batches per update.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep_checkpoints: the number of newest checkpoints to keep.
        resume: "auto" resumes from the newest checkpoint in the folder, if there is one. "never" does not resume. The
            folder of another run's checkpoint starts from it, as long as this run has no checkpoints of its own.
        resume_data: resume at the saved position in the data; False starts a new epoch, for example after a change of
            the batch size.
        log_every: steps between logs.
        record_every: steps between recorded timelines; 0: only the last step.
        on_nan: what to do if a loss or gradient is not finite: "stop" before the update, "skip" the update, "rewind" to
            the last checkpoint and continue with the data that follows, or "ignore" it.
        on_oom: what to do if memory runs out: "split" runs the step again, and all later steps, with twice as many
            micro-batches of the same batch; "stop" ends the training and advises on settings that need less memory.
        max_seconds: end with a checkpoint after this time.
        callbacks: notified of events. The trainer always adds a `Journal`, which writes `events.jsonl`.
        view: show the training: a live picture in a terminal, lines elsewhere.
        split: a function from an item of the data to (batch, target).
        count_tokens: a function from a batch, or (batch, target), to its number of tokens, for the log.

    Raises:
        UsageError: for invalid arguments.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        data: Iterable[Any],
        *,
        steps: int,
        folder: str | Path,
        scheduler: Any | Sequence[Any] | None = None,  # noqa: ANN401 - torch's have no common type
        scaler: torch.amp.GradScaler | None = None,
        validation: Iterable[Any] | None = None,
        validate_every: int = 0,
        clip: float | None = None,
        accumulate: int = 1,
        checkpoint_every: int = 0,
        keep_checkpoints: int = 3,
        resume: str | Path = "auto",
        log_every: int = 10,
        record_every: int = 0,
        on_nan: str = "stop",
        on_oom: str = "split",
        max_seconds: float | None = None,
        callbacks: Iterable[Callback] = (),
        view: bool = True,
        resume_data: bool = True,
        split: Split | None = None,
        count_tokens: Callable[[Any], int] | None = None,
    ) -> None:
        self.options = TrainerOptions(
            steps, validate_every, clip, accumulate, checkpoint_every, keep_checkpoints, resume, log_every,
            record_every, on_nan, on_oom, max_seconds,
        )  # fmt: skip
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"pipe: expected a penstock.Pipeline; given: {type(pipe).__name__}")
        self.pipe, self.optimizer = pipe, optimizer
        self.schedulers = (
            [] if scheduler is None else list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        )
        self.is_first = 0 in pipe.lanes
        self.folder = RunFolder(folder, is_first=self.is_first)
        self.step = 0
        self.reading: Reading | None = None
        self.validation_loss: float | None = None
        self._items, self._count_tokens = ItemReader(split, has_target=pipe.internals.loss is not None), count_tokens
        for what, loader in (("data", data._loader if isinstance(data, Feed) else data), ("validation", validation)):
            check_not_sharded(loader, pipe, what)
        self._feed = data if isinstance(data, Feed) else feed(data, pipe, split=split)
        self._validation = validation
        self._position, self._resumes_data = DataPosition(self._feed), resume_data
        self.stepper = Stepper(pipe, optimizer, self.schedulers, scaler, clip=clip, accumulate=accumulate)
        self._check_options()
        self._memory_retry = MemoryRetry(self)
        self._callbacks = Callbacks(_with_defaults(callbacks, view=view))
        self._checkpoints: Checkpoints  # while it runs
        self._signals = Signals()
        self.data_watch = DataWatch(pipe)
        self._should_stop, self._num_rewinds = False, 0
        self._validated = 0  # the last step that was validated
        self._pages: list[Path] = []  # of recorded steps
        self._skipped: list[int] = []
        self._losses: list[float] = []
        self._lane_bytes: tuple[int, ...] = ()
        self._timeline: Timeline | None = None

    def stop(self) -> None:
        """End after this step, with a checkpoint; for callbacks."""
        self._should_stop = True

    def fit(self) -> Summary:
        """Train; return a summary.

        Raises:
            UsageError: if the folder is in use, or contradicts `resume`.
            CheckpointError: if there are checkpoints, but none is good or fits the model.
            NonFiniteError: for a loss or gradient that is not finite, as `on_nan` says.
            LaneError: if an action failed.
        """
        begin = time.monotonic()
        self._should_stop = False
        with with_threads(threads_per_lane(self.pipe.devices)), ExitStack() as stack:
            self._signals = stack.enter_context(Signals())
            stack.enter_context(self.data_watch)
            self._lock_folder()
            stack.callback(self.folder.release)
            stack.callback(self._callbacks.close)
            self._checkpoints = stack.enter_context(self._make_checkpoints())
            self._checkpoints.check()  # raise now, not after the last step
            faults = FaultHandler(self, self._callbacks)
            restored = self._resume(faults)
            self._write_plan()
            self._callbacks.notify("on_train_begin", self)
            if restored is not None:
                self._callbacks.notify("on_recover", self, restored.step)
            with faults.recorded():
                status = None
                if restored is not None and self._is_validated(self.step) and not restored.notes.get("validated"):
                    status = self._validate()  # the validation of this step came after the checkpoint, or never
                status = status or self._loop(faults, begin)
                faults.at("save", self.step)
                if restored is None or self.step != restored.step:
                    self._save(wait=True)
                if self._validation is not None and status == "done":
                    status = self._validate() or status
            summary = self._summary(status, restored, time.monotonic() - begin)
            self._callbacks.notify("on_train_end", self, summary)
        return summary

    # ---- begin

    def _check_options(self) -> None:
        """Raise if options contradict each other."""
        if self.pipe.optimizers and self.options.on_nan == "skip":
            raise UsageError(
                f"on_nan: {self.pipe.schedule.name} updates weights within the step, so an update cannot be skipped: "
                'use "stop" or "rewind"'
            )
        if self.stepper.has_plateau and not (self._validation is not None and self.options.validate_every):
            raise UsageError("scheduler: ReduceLROnPlateau needs validation losses: pass validation and validate_every")

    def _lock_folder(self) -> None:
        """Lock the folder; if the first process cannot, all processes raise."""
        fault: BaseException | None = None
        try:
            self.folder.take()
        except (UsageError, OSError) as error:
            fault = error
        reason = next((text for text in self.pipe.internals.gather("" if fault is None else str(fault)) if text), "")
        if fault is not None:
            raise fault
        if reason:
            raise UsageError(reason)

    def _make_checkpoints(self) -> Checkpoints:
        made = Checkpoints(
            self.folder.path,
            self.pipe,
            optimizer=self.stepper.optimizers,
            scheduler=self.schedulers,
            scaler=self.stepper.scaler,
            data=self._position,
            keep=self.options.keep_checkpoints,
        )
        made.fence = self.folder.why_lost
        made.on_saved = lambda step, folder: self._callbacks.notify("on_save", self, step, folder)
        return made

    def _resume(self, faults: FaultHandler) -> Restored | None:
        with nullcontext() if self._resumes_data else self._position.kept():
            restored = resume(self._checkpoints, str(self.options.resume), self.folder.path, self.stepper.optimizers)
        if restored is not None:
            self.step = restored.step
            self._skipped = list(restored.notes.get("skipped", []))
            for why in restored.passed_over:
                faults.report("damaged checkpoint", restored.step, why)
        return restored

    def _write_plan(self) -> None:
        """Save the plan, for a pipeline that resumes in this folder."""
        try:
            self.folder.write(NAME, self.pipe.plan.to_json())
        except OSError as error:
            warn_user(f"{NAME}: cannot be written ({error}); a resume will make a new plan")

    # ---- the loop

    def _loop(self, faults: FaultHandler, begin: float) -> str:
        """Run steps until all are done or something ends the training; return the reason."""
        batches, is_first = self._batches(), True
        while self.step < self.options.steps:
            self._callbacks.notify("on_step_begin", self)
            start = time.monotonic()
            faults.at("data", self.step + 1)
            given = [item for _, item in zip(range(self.stepper.accumulate), batches, strict=False)]
            if len(given) < self.stepper.accumulate:
                return "data ended"
            # the first wait includes the start of loaders and the skipped batches, so it does not count as step time
            self._run_step(given, faults, time.monotonic() if is_first else start)
            is_first = False
            why = self._why_to_end(begin)
            if why is not None:
                return why
        return "done"

    def _run_step(self, given: list[Any], faults: FaultHandler, start: float) -> None:
        number = self.step + 1
        faults.at("step", number)
        is_recorded = number == self.options.steps or _is_due(number, self.options.record_every)
        items = [self._items.call(item) for item in given]
        made = self._memory_retry.run(items, faults, number, is_recorded=is_recorded)
        if made.timeline is not None:
            self._timeline = made.timeline
        rates = self.stepper.rates
        if faults.should_update(made, items, number):
            faults.at("optimizer", number)
            self.stepper.update(lambda: self._callbacks.notify("on_pre_optimizer_step", self))
        else:
            self.stepper.drop()
            if self.options.on_nan == "rewind":
                self._rewind(number)
                return
            self._skipped.append(number)
        tokens = None if self._count_tokens is None else sum(self._count_tokens(item) for item in given)
        norm = math.nan if made.gradient_norm is None else made.gradient_norm
        self.reading = Reading(
            number, self.options.steps, self._feed.epoch, made.loss, norm, rates, time.monotonic() - start,
            sum(self.pipe.num_samples(call[0]) for call in items), tokens, self._timeline, self._lane_bytes,
            made.metrics,
        )  # fmt: skip
        self._finish_step(number, made)

    def _finish_step(self, number: int, made: UpdateResult) -> None:
        self.step, options = number, self.options
        is_logged = number in (1, options.steps) or _is_due(number, options.log_every)
        if is_logged:  # needs a message between processes, so not in every step
            self._lane_bytes = lane_bytes(self.pipe, optimizers=self.stepper.optimizers, timeline=self._timeline)
            assert self.reading is not None
            self.reading = replace(self.reading, lane_bytes=self._lane_bytes)
        self._losses.append(made.loss)
        self._callbacks.notify("on_step_end", self, self.reading)
        self._checkpoints.poll()
        if made.timeline is not None and self.is_first:
            self._write_page(number, made.timeline)
        if is_logged:
            self._log()
        if _is_due(number, options.checkpoint_every) and number < options.steps:
            self._save()
        if self._is_validated(number):
            self._validate()

    def _is_validated(self, step: int) -> bool:
        """Return whether a validation follows a step; after the last step it follows the checkpoint instead."""
        is_due = _is_due(step, self.options.validate_every) and step < self.options.steps
        return self._validation is not None and is_due

    def _batches(self) -> Iterator[Any]:
        """Yield items, epoch after epoch, until an epoch is empty."""
        while True:
            num_given = 0
            was_resumed = self._feed.state_dict()["batches"] > 0
            for item in self.data_watch.watched(self._feed):
                num_given += 1
                yield item
            if not num_given and not was_resumed:
                return

    def _why_to_end(self, begin: float) -> str | None:
        """Return the reason to end now in all processes, or None."""
        limit = self.options.max_seconds
        is_late = limit is not None and time.monotonic() - begin > limit
        own = self._signals.received or ("stopped" if self._should_stop else "time" if is_late else None)
        return self._anyone(own)

    def _anyone(self, own: str | None) -> str | None:
        """Return the reason of the first process that has one."""
        return next((why for why in self.pipe.internals.gather(own) if why is not None), None)

    # ---- actions at some steps

    def _log(self) -> None:
        assert self.reading is not None
        figures = self.reading.figures() | {"mean_loss": math.fsum(self._losses) / len(self._losses)}
        self._losses.clear()
        self._callbacks.notify("on_log", self, figures)

    def _write_page(self, step: int, timeline: Timeline) -> None:
        """Write the page of a recorded step; on an error, only warn, since a full disk must not end the training."""
        page = self.folder.path / "timelines" / f"step-{step:06d}.html"
        try:
            page.parent.mkdir(exist_ok=True)
            timeline.to_html(page, compare=self.pipe.internals.predicted())
        except OSError as error:
            warn_user(f"the timeline of step {step} was not written: {error}; the training continues")
            return
        self._pages.append(page)
        self._callbacks.notify("on_record", self, page)

    def _validate(self) -> str | None:
        """Validate; return the signal's name if a signal ended it: a resume then validates again."""
        begin = time.monotonic()
        assert self._validation is not None
        data = self.data_watch.watched(self._validation)
        made = validate(self.pipe, data, self._items, lambda: self._anyone(self._signals.received))
        if isinstance(made, str):
            return made
        loss, metrics, count = made
        seconds = time.monotonic() - begin
        figures: dict[str, Any] = {"step": self.step, "validation_loss": loss, "samples": count, "seconds": seconds}
        if metrics:
            figures["metrics"] = metrics
        self.validation_loss, self._validated = loss, self.step
        self.stepper.follow(loss)
        self._callbacks.notify("on_evaluate", self, figures)
        return None

    def _save(self, *, wait: bool = False) -> None:
        notes = {"skipped": self._skipped, "steps": self.options.steps, "validated": self._validated == self.step}
        if self.step:
            self._checkpoints.save(self.step, notes=notes, wait=wait)

    def _rewind(self, number: int) -> None:
        """Restore the weights of the last checkpoint, and continue with the data that follows."""
        self._checkpoints.wait()
        with self._position.kept():
            restored = self._checkpoints.restore("newest")
        if restored is None:
            raise NonFiniteError(f"step {number}: there is no checkpoint to rewind to; pass checkpoint_every=")
        self._num_rewinds += 1
        if self._num_rewinds > _MOST_REWINDS:
            raise NonFiniteError(f"step {number}: still not finite after {_MOST_REWINDS} rewinds")
        self.step = restored.step
        self._callbacks.notify("on_recover", self, restored.step)

    def _summary(self, status: str, restored: Restored | None, seconds: float) -> Summary:
        return Summary(
            status, self.step, self.options.steps, None if self.reading is None else self.reading.loss,
            self.validation_loss, seconds, self.folder.path, restarts=attempt(),
            resumed_from=None if restored is None else restored.step,
            checkpoints=tuple(self._checkpoints.folders()), failures=tuple(self._checkpoints.failures),
            timelines=tuple(self._pages), skipped=tuple(self._skipped),
        )  # fmt: skip


def _with_defaults(callbacks: Iterable[Callback], *, view: bool) -> list[Callback]:
    """Add a journal and a view if they are missing; the journal comes first, so that it misses nothing."""
    given = list(callbacks)
    kinds: list[type[Callback]] = [Journal, View] if view else [Journal]
    return [kind() for kind in kinds if not any(isinstance(one, kind) for one in given)] + given


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
