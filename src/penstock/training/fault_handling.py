"""Faults: what a training does about what goes wrong in it: it is told, written down, and judged."""

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
    from penstock.training.stepper import Made
    from penstock.training.trainer import Trainer

__all__ = ["Faults"]


class Faults:
    """The faults of a training.

    Args:
        trainer: whose they are.
        callbacks: to be told of them.
    """

    def __init__(self, trainer: Trainer, callbacks: Callbacks) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self._injector = Injector.from_environment()
        if self._injector is not None and trainer.pipe.watch is None:
            trainer.pipe.watch = self._injector  # sees the actions too

    def at(self, point: str, step: int) -> None:
        """Let a fault happen here that was asked for, as a test or a rehearsal does."""
        if self._injector is not None:
            self._injector.at(point, lane=self._trainer.pipe.lanes[0], step=step)

    def is_taken(self, made: Made, items: Sequence[tuple[Any, ...]], step: int) -> bool:
        """Return whether an update is to be made of what a step gave; all processes decide the same.

        Raises:
            NonFiniteError: saying where it began, when the training is to stop.
        """
        policy, stepper = self._trainer.asked.on_nan, self._trainer.stepper
        if made.is_finite or policy == "ignore" or (made.has_finite_loss and stepper.scaler is not None):
            return True
        what = "the loss is" if not made.has_finite_loss else "the gradients are"
        place = next((found for found in (locate(self._trainer.pipe, *item) for item in items) if found), None)
        where = f": {place}" if place else ""
        message = f"step {step}: {what} not finite (loss {made.loss}, gradient norm {made.gradient_norm}){where}"
        self.tell("nonfinite", step, message, policy=policy)
        if policy == "stop":
            is_late = bool(self._trainer.pipe.optimizers)  # of a schedule that updates within the step
            kept = "have changed within the step" if is_late else f"are those of step {step - 1}"
            raise NonFiniteError(f"{message}. The weights {kept}")
        warn_user(f"{message}; {'the update is skipped' if policy == 'skip' else 'rewinding'}")
        return False

    def tell(self, kind: str, step: int, message: str, **more: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        """Write a fault down and tell the callbacks."""
        lanes = list(self._trainer.pipe.lanes)
        fault = {"kind": kind, "step": step, "lanes": lanes, "message": message, **more}
        if self._trainer.is_first:
            try:
                self._trainer.folder.append("faults.jsonl", fault)
            except OSError as error:  # a full disk must not hide what happened
                warn_user(f"faults.jsonl cannot be written: {error.strerror}")
        self._callbacks.tell("on_fault", self._trainer, fault)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Write down what ends the training inside."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(advice(self._trainer.pipe, error))
            self.tell("error", self._trainer.step + 1, error_in_short(error, 2_000), is_lost=is_lost(error))
            raise
