"""Trainer: the loop around a pipeline; it resumes, logs, validates, saves, and ends when it is told to."""

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
from penstock.feeding.sharded_loaders import check_not_sharded
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.planned.placement import threads_per_lane, with_threads
from penstock.torchrun import attempt
from penstock.training.batch_items import Items, Split
from penstock.training.callbacks.callback import Callback, Callbacks
from penstock.training.callbacks.journal import Journal
from penstock.training.callbacks.lane_memory import lane_bytes
from penstock.training.callbacks.progress import Reading, Summary
from penstock.training.callbacks.timeline_pages import Pages
from penstock.training.data_watch import DataWatch
from penstock.training.fault_handling import Faults
from penstock.training.memory_retry import MemoryRetry
from penstock.training.resume.data_position import Position
from penstock.training.resume.resuming import resume
from penstock.training.resume.run_folder import RunFolder
from penstock.training.signals import Signals
from penstock.training.stepper import Made, Stepper
from penstock.training.trainer_options import TrainerOptions
from penstock.training.validation import validate
from penstock.training.view.view import View

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

__all__ = ["Trainer"]

_MOST_REWINDS = 5  # in one run: then it is not the data


class Trainer:
    """Trains a pipeline for some steps, and keeps all that is worth keeping in a folder.

    What it adds to a loop of one's own: it goes on where the last checkpoint in the folder is, saves on the way without
    a stop, logs, validates, records timelines, ends with a checkpoint when it is told to (SIGTERM, Ctrl-C), and stops
    before a loss that is not a number reaches the weights.

    Args:
        pipe: the pipeline.
        optimizer: made of `pipe.parameters()`; None for schedules that update weights within the step.
        data: batches for `pipe.step`: a DataLoader, a feed, or whatever can be iterated over, each time anew; each item
            is (batch, target), or a batch alone for a model that knows its loss.
        steps: updates, those before a resume counted in.
        folder: where everything goes; one training at a time.
        scheduler: of the learning rate, or several; stepped after each update, ReduceLROnPlateau after each validation.
        scaler: the GradScaler that the pipeline was given; it is known without being given.
        validation: batches to validate with.
        validate_every: steps between validations; 0: only at the end.
        clip: the most that the norm of all gradients may be.
        accumulate: batches of an update.
        checkpoint_every: steps between checkpoints; 0: only at the end.
        keep_checkpoints: how many of the newest are kept.
        resume: "auto" goes on from the newest checkpoint in the folder, if there is one; "never" does not; the folder
            of another run's checkpoint is where this one begins, as long as it has no checkpoints of its own.
        resume_data: go on in the data where it was; False begins an epoch anew, as for batches of another size.
        log_every: steps between logs.
        record_every: steps between recorded timelines; 0: only the last step's.
        on_nan: what to do with a loss or gradient that is not finite: "stop" before the update, "skip" the update, or
            "rewind" to the last checkpoint and go on with the data that follows; "ignore" takes it as it is.
        on_oom: what to do when memory runs out: "split" runs the step again, and all after it, with twice the
            micro-batches of the same batch; "stop" ends the training, with what would take less.
        max_seconds: end, with a checkpoint, after so long.
        callbacks: to be told what happens. A journal of all, `events.jsonl`, is kept without being asked for.
        view: show the training: a live picture in a terminal, lines elsewhere.
        split: from an item of the data to (batch, target).
        count_tokens: tokens of what the loop is handed, a batch or (batch, target), for the log.

    Raises:
        UsageError: for arguments that cannot be right.
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
        self.asked = TrainerOptions(
            steps, validate_every, clip, accumulate, checkpoint_every, keep_checkpoints, resume, log_every,
            record_every, on_nan, on_oom, max_seconds,
        )  # fmt: skip
        if not isinstance(pipe, Pipeline):
            raise UsageError(f"pipe: give a penstock.Pipeline; given: {type(pipe).__name__}")
        self.pipe, self.optimizer = pipe, optimizer
        self.schedulers = (
            [] if scheduler is None else list(scheduler) if isinstance(scheduler, Sequence) else [scheduler]
        )
        self.is_first = 0 in pipe.lanes
        self.folder = RunFolder(folder, is_first=self.is_first)
        self.step = 0
        self.reading: Reading | None = None
        self.validation_loss: float | None = None
        self._items, self._count_tokens = Items(split, has_target=pipe.internals.loss is not None), count_tokens
        for what, loader in (("data", data._loader if isinstance(data, Feed) else data), ("validation", validation)):
            check_not_sharded(loader, pipe, what)
        self._feed = data if isinstance(data, Feed) else feed(data, pipe, split=split)
        self._validation = validation
        self._position, self._resumes_data = Position(self._feed), resume_data
        self.stepper = Stepper(pipe, optimizer, self.schedulers, scaler, clip=clip, accumulate=accumulate)
        self._check_words()
        self._room = MemoryRetry(self)
        self._callbacks = Callbacks(_with_usual(callbacks, view=view))
        self._checkpoints: Checkpoints | None = None
        self._signals = Signals()
        self.data_watch = DataWatch(pipe)
        self._should_stop, self._num_rewinds = False, 0
        self._validated = 0  # the last step that was
        self._pages = Pages(self.folder.path, self.pipe.internals.predicted)
        self._skipped: list[int] = []
        self._losses: list[float] = []
        self._lane_bytes: tuple[int, ...] = ()
        self._timeline: Timeline | None = None

    def stop(self) -> None:
        """End after this step, with a checkpoint; for callbacks."""
        self._should_stop = True

    def fit(self) -> Summary:
        """Train; return how it ended.

        Raises:
            UsageError: when the folder is in use, or does not go with `resume`.
            CheckpointError: when there are checkpoints, and none of them is good or fits the model.
            NonFiniteError: for a loss or gradient that is not finite, unless it is to be skipped.
            LaneError: when an action failed.
        """
        begin = time.monotonic()
        self._should_stop = False
        with with_threads(threads_per_lane(self.pipe.devices)), ExitStack() as stack:
            self._signals = stack.enter_context(Signals())
            stack.enter_context(self.data_watch)
            self._take_folder()
            stack.callback(self.folder.release)
            stack.callback(self._callbacks.close)
            self._checkpoints = stack.enter_context(self._make_checkpoints())
            self._checkpoints.check()  # now, and not after the last step
            faults = Faults(self, self._callbacks)
            restored = self._resume(faults)
            self._write_plan()
            self._callbacks.tell("on_train_begin", self)
            if restored is not None:
                self._callbacks.tell("on_recover", self, restored.step)
            with faults.noting():
                status = None
                if restored is not None and self._is_validated(self.step) and not restored.notes.get("validated"):
                    status = self._validate()  # that of its step came after the checkpoint, or not at all
                status = status or self._loop(faults, begin)
                faults.at("save", self.step)
                if restored is None or self.step != restored.step:
                    self._save(wait=True)
                if self._validation is not None and status == "done":
                    status = self._validate() or status
            summary = self._summary(status, restored, time.monotonic() - begin)
            self._callbacks.tell("on_train_end", self, summary)
        return summary

    # ---- begin

    def _check_words(self) -> None:
        """Raise for what does not go together."""
        if self.pipe.optimizers and self.asked.on_nan == "skip":
            raise UsageError(
                f"on_nan: {self.pipe.schedule.name} updates weights within the step, so that nothing is left to skip: "
                'give "stop" or "rewind"'
            )
        if self.stepper.has_plateau and not (self._validation is not None and self.asked.validate_every):
            raise UsageError("scheduler: ReduceLROnPlateau follows validation losses: give validation, validate_every")

    def _take_folder(self) -> None:
        """Take the folder; when the first process cannot, all say why."""
        fault: BaseException | None = None
        try:
            self.folder.take()
        except (UsageError, OSError) as error:
            fault = error
        told = next((text for text in self.pipe.internals.gather("" if fault is None else str(fault)) if text), "")
        if fault is not None:
            raise fault
        if told:
            raise UsageError(told)

    def _make_checkpoints(self) -> Checkpoints:
        made = Checkpoints(
            self.folder.path,
            self.pipe,
            optimizer=self.stepper.optimizers,
            scheduler=self.schedulers,
            scaler=self.stepper.scaler,
            data=self._position,
            keep=self.asked.keep_checkpoints,
        )
        made.fence = self.folder.why_lost
        made.on_saved = lambda step, folder: self._callbacks.tell("on_save", self, step, folder)
        return made

    def _resume(self, faults: Faults) -> Restored | None:
        assert self._checkpoints is not None
        with nullcontext() if self._resumes_data else self._position.kept():
            restored = resume(self._checkpoints, str(self.asked.resume), self.folder.path, self.stepper.optimizers)
        if restored is not None:
            self.step = restored.step
            self._skipped = list(restored.notes.get("skipped", []))
            for why in restored.passed_over:
                faults.tell("damaged checkpoint", restored.step, why)
        return restored

    def _write_plan(self) -> None:
        """Write down how the model is cut, for a pipeline that goes on in this folder."""
        try:
            self.folder.write(NAME, self.pipe.plan.to_json())
        except OSError as error:
            warn_user(f"{NAME}: cannot be written ({error}); a resume decides anew")

    # ---- the loop

    def _loop(self, faults: Faults, begin: float) -> str:
        """Run steps until all are done or something ends them; return why it ended."""
        batches, is_first = self._batches(), True
        while self.step < self.asked.steps:
            self._callbacks.tell("on_step_begin", self)
            start = time.monotonic()
            faults.at("data", self.step + 1)
            given = [item for _, item in zip(range(self.stepper.accumulate), batches, strict=False)]
            if len(given) < self.stepper.accumulate:
                return "data ended"
            # the first wait is for loaders to start, and to pass over what was trained on before: no step's time
            self._run_step(given, faults, time.monotonic() if is_first else start)
            is_first = False
            why = self._why_to_end(begin)
            if why is not None:
                return why
        return "done"

    def _run_step(self, given: list[Any], faults: Faults, start: float) -> None:
        number = self.step + 1
        faults.at("step", number)
        is_recorded = number == self.asked.steps or _is_due(number, self.asked.record_every)
        items = [self._items.call(item) for item in given]
        made = self._room.run(items, faults, number, is_recorded=is_recorded)
        if made.timeline is not None:
            self._timeline = made.timeline
        rates = self.stepper.rates
        if faults.is_taken(made, items, number):
            faults.at("optimizer", number)
            self.stepper.update(lambda: self._callbacks.tell("on_pre_optimizer_step", self))
        else:
            self.stepper.drop()
            if self.asked.on_nan == "rewind":
                self._rewind(number)
                return
            self._skipped.append(number)
        tokens = None if self._count_tokens is None else sum(self._count_tokens(item) for item in given)
        norm = math.nan if made.gradient_norm is None else made.gradient_norm
        self.reading = Reading(
            number, self.asked.steps, self._feed.epoch, made.loss, norm, rates, time.monotonic() - start,
            sum(self.pipe.num_samples(call[0]) for call in items), tokens, self._timeline, self._lane_bytes,
            made.metrics,
        )  # fmt: skip
        self._finish_step(number, made)

    def _finish_step(self, number: int, made: Made) -> None:
        self.step, asked = number, self.asked
        is_logged = number in (1, asked.steps) or _is_due(number, asked.log_every)
        if is_logged:  # all processes tell each other, which is not for every step
            self._lane_bytes = lane_bytes(self.pipe, optimizers=self.stepper.optimizers, timeline=self._timeline)
            assert self.reading is not None
            self.reading = replace(self.reading, lane_bytes=self._lane_bytes)
        self._losses.append(made.loss)
        self._callbacks.tell("on_step_end", self, self.reading)
        if self._checkpoints is not None:
            self._checkpoints.poll()
        page = self._pages.write(number, made.timeline) if made.timeline is not None and self.is_first else None
        if page is not None:
            self._callbacks.tell("on_record", self, page)
        if is_logged:
            self._log()
        if _is_due(number, asked.checkpoint_every) and number < asked.steps:
            self._save()
        if self._is_validated(number):
            self._validate()

    def _is_validated(self, step: int) -> bool:
        """Whether a validation follows a step; that of the last step follows its checkpoint."""
        is_due = _is_due(step, self.asked.validate_every) and step < self.asked.steps
        return self._validation is not None and is_due

    def _batches(self) -> Iterator[Any]:
        """Yield items, epoch after epoch, until an epoch has none."""
        while True:
            num_given = 0
            was_resumed = self._feed.state_dict()["batches"] > 0
            for item in self.data_watch.over(self._feed):
                num_given += 1
                yield item
            if not num_given and not was_resumed:
                return

    def _why_to_end(self, begin: float) -> str | None:
        """Return why all processes end now; None where they go on."""
        limit = self.asked.max_seconds
        is_late = limit is not None and time.monotonic() - begin > limit
        own = self._signals.told or ("stopped" if self._should_stop else "time" if is_late else None)
        return self._anyone(own)

    def _anyone(self, own: str | None) -> str | None:
        """Return what the first process that has a reason to end gives."""
        return next((why for why in self.pipe.internals.gather(own) if why is not None), None)

    # ---- what happens at some steps

    def _log(self) -> None:
        assert self.reading is not None
        figures = self.reading.figures() | {"mean_loss": math.fsum(self._losses) / len(self._losses)}
        self._losses.clear()
        self._callbacks.tell("on_log", self, figures)

    def _validate(self) -> str | None:
        """Validate; return why that was ended, where a signal did so: whoever resumes does it anew."""
        begin = time.monotonic()
        assert self._validation is not None
        made = validate(
            self.pipe, self.data_watch.over(self._validation), self._items, lambda: self._anyone(self._signals.told)
        )
        if isinstance(made, str):
            return made
        loss, metrics, count = made
        seconds = time.monotonic() - begin
        figures: dict[str, Any] = {"step": self.step, "validation_loss": loss, "samples": count, "seconds": seconds}
        if metrics:
            figures["metrics"] = metrics
        self.validation_loss, self._validated = loss, self.step
        self.stepper.follow(loss)
        self._callbacks.tell("on_evaluate", self, figures)
        return None

    def _save(self, *, wait: bool = False) -> None:
        assert self._checkpoints is not None
        notes = {"skipped": self._skipped, "steps": self.asked.steps, "validated": self._validated == self.step}
        if self.step:
            self._checkpoints.save(self.step, notes=notes, wait=wait)

    def _rewind(self, number: int) -> None:
        """Go back to the weights of the last checkpoint, and on with the data that follows what was used."""
        assert self._checkpoints is not None
        self._checkpoints.wait()
        with self._position.kept():
            restored = self._checkpoints.restore("newest")
        if restored is None:
            raise NonFiniteError(f"step {number}: there is no checkpoint yet to rewind to; give checkpoint_every=")
        self._num_rewinds += 1
        if self._num_rewinds > _MOST_REWINDS:
            raise NonFiniteError(f"step {number}: rewound {_MOST_REWINDS} times, and it is not finite again")
        self.step = restored.step
        self._callbacks.tell("on_recover", self, restored.step)

    def _summary(self, status: str, restored: Restored | None, seconds: float) -> Summary:
        assert self._checkpoints is not None
        return Summary(
            status, self.step, self.asked.steps, None if self.reading is None else self.reading.loss,
            self.validation_loss, seconds, self.folder.path, restarts=attempt(),
            resumed_from=None if restored is None else restored.step,
            checkpoints=tuple(self._checkpoints.folders()), failures=tuple(self._checkpoints.failures),
            timelines=tuple(self._pages.paths), skipped=tuple(self._skipped),
        )  # fmt: skip


def _with_usual(callbacks: Iterable[Callback], *, view: bool) -> list[Callback]:
    """Return callbacks, and a journal and a view if they have none; the journal first, for it must not miss a thing."""
    given = list(callbacks)
    kinds: list[type[Callback]] = [Journal, View] if view else [Journal]
    return [kind() for kind in kinds if not any(isinstance(one, kind) for one in given)] + given


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
