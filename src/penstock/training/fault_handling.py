"""Fault handling: report the faults of a training, record them, and decide what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from penstock.errors import NonFiniteError, error_in_short, warn_user
from penstock.faults.injector import Injector
from penstock.faults.lost_peers import is_lost
from penstock.faults.nonfinite import locate
from penstock.faults.out_of_memory import advice, is_out_of_memory

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Callbacks
    from penstock.training.stepper import UpdateResult
    from penstock.training.trainer import Trainer


class FaultHandler:
    """Handles the faults of a training.

    Args:
        trainer: the trainer.
        callbacks: the callbacks to notify.
    """

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
