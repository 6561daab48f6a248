"""Fault handling: report the faults of a training, record them, decide what to do, and retry if memory ran out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.devices.kinds import kind_of
from penstock.errors import HangError, LaneError, LostError, NonFiniteError, error_in_short, warn_user
from penstock.faults.injector import Injector
from penstock.faults.lost_peers import is_lost
from penstock.faults.nonfinite import locate
from penstock.faults.out_of_memory import advice, is_out_of_memory
from penstock.pipeline.smaller_micro_batches import split_finer
from penstock.pipeline.state_snapshot import StateSnapshot

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Callbacks
    from penstock.training.stepper import UpdateResult
    from penstock.training.trainer import Trainer


class FaultHandler:
    """Handles the faults of a training."""

    def __init__(self, trainer: Trainer, callbacks: Callbacks) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self._injector = Injector.from_environment()
        if self._injector is not None and trainer.pipe.watch is None:
            trainer.pipe.watch = self._injector  # for faults at actions

    def at(self, point: str, step: int) -> None:
        """Inject the faults for this point; used by tests and rehearsals."""
        if self._injector is not None:
            self._injector.at(point, lane=self._trainer.pipe.lanes[0], step=step)

    def should_update(self, made: UpdateResult, items: Sequence[tuple[Any, ...]], step: int) -> bool:
        """Return whether the optimizer should use the gradients of a step; all processes decide the same.

        Raises:
            NonFiniteError: with the place where it began, if the training must stop.
        """
        policy, stepper = self._trainer.options.on_nan, self._trainer.stepper
        if made.is_finite or policy == "ignore" or (made.has_finite_loss and stepper.scaler is not None):
            return True
        what = "the loss is" if not made.has_finite_loss else "the gradients are"
        place = next((found for found in (locate(self._trainer.pipe, *item) for item in items) if found), None)
        where = f": {place}" if place else ""
        message = f"step {step}: {what} not finite (loss {made.loss}, gradient norm {made.gradient_norm}){where}"
        self.report("nonfinite", step, message, policy=policy)
        if policy == "stop":
            is_late = bool(self._trainer.pipe.optimizers)  # the schedule updates within the step
            kept = "have changed within the step" if is_late else f"are those of step {step - 1}"
            raise NonFiniteError(f"{message}. The weights {kept}")
        warn_user(f"{message}; {'the update is skipped' if policy == 'skip' else 'rewinding'}")
        return False

    def report(self, kind: str, step: int, message: str, **more: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Record a fault and notify the callbacks."""
        lanes = list(self._trainer.pipe.lanes)
        fault = {"kind": kind, "step": step, "lanes": lanes, "message": message, **more}
        if self._trainer.is_first:
            try:
                self._trainer.folder.append("faults.jsonl", fault)
            except OSError as error:  # a full disk must not hide the fault
                warn_user(f"faults.jsonl cannot be written: {error.strerror}")
        self._callbacks.notify("on_fault", self._trainer, fault)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record an error that ends the training."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(advice(self._trainer.pipe, error))
            self.report("error", self._trainer.step + 1, error_in_short(error, 2_000), is_lost=is_lost(error))
            raise


class MemoryRetry:
    """Runs updates. If memory runs out, it runs the same batch again with more micro-batches.

    Buffers and random states are restored before the next try. So the result is that of a training that has this number
    of micro-batches from this step on.

    Args:
        trainer: the trainer; its `on_oom` applies.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._pipe, self._stepper = trainer.pipe, trainer.stepper
        can_split = trainer.pipe.schedule.versions is None  # otherwise weights have changed already
        self._before = StateSnapshot(trainer.pipe) if trainer.options.on_oom == "split" and can_split else None

    def run(
        self, items: Sequence[tuple[Any, ...]], faults: FaultHandler, number: int, *, is_recorded: bool
    ) -> UpdateResult:
        """Run the forward and backward of an update.

        Raises:
            LaneError: if an action failed, and smaller micro-batches do not help.
        """
        if self._before is None:
            return self._stepper.run(items, is_recorded=is_recorded)
        note = ""
        while True:
            self._before.take()
            try:
                return self._stepper.run(items, is_recorded=is_recorded)
            except (HangError, LostError):  # subclasses of LaneError: other processes may be gone
                raise
            except LaneError as error:
                message = str(error)
                count = self._pipe.schedule.num_mbs
                if not self._can_retry(error):
                    if note:
                        error.add_note(note)
                    raise
            # outside of `except`: the error's frames keep the step's tensors alive
            note = f"memory ran out with {count} micro-batches: {message}"
            self._clear()
            self._report(faults, number, message)

    def _can_retry(self, error: LaneError) -> bool:
        if error.was_not_started:  # the process that refused has left and given the reason
            return False
        # all processes must decide the same, even if only some see it as out of memory
        return all(self._pipe.internals.gather(is_out_of_memory(error))) and split_finer(self._pipe)

    def _clear(self) -> None:
        assert self._before is not None
        self._stepper.forget()
        self._before.restore()
        gc.collect()
        for device in set(self._pipe.devices):
            kind_of(device).release_memory()

    def _report(self, faults: FaultHandler, number: int, message: str) -> None:
        count = self._pipe.schedule.num_mbs
        text = f"step {number}: memory ran out ({message}); this step and all later ones run with {count} micro-batches"
        text += f"; pass micro_batches={count} to start with this number"
        faults.report("out of memory", number, text, micro_batches=count)
        warn_user(text)
