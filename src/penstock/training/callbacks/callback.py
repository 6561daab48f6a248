"""Callback: the base class of objects that are notified of events in a training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, error_in_short, warn_user

if TYPE_CHECKING:
    from penstock.training.callbacks.progress import Reading, Summary
    from penstock.training.trainer import Trainer


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
                self._warn(callback, name, error)

    def close(self) -> None:
        """Close all callbacks; ignore errors."""
        for callback in self._all:
            with suppress(Exception):
                callback.close()

    def _warn(self, callback: Callback, name: str, error: Exception) -> None:
        if (id(callback), name) in self._warned:
            return
        self._warned.add((id(callback), name))
        warn_user(
            f"{type(callback).__name__}.{name} raised {error_in_short(error)}; the training continues. "
            "This warning appears once. Set strict = True in the callback to end the training instead"
        )
