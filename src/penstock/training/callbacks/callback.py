"""Callback: what a user, a log or a view is told of while a training runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, error_in_short, warn_user

if TYPE_CHECKING:
    from penstock.training.callbacks.progress import Reading, Summary
    from penstock.training.trainer import Trainer

__all__ = ["Callback", "Callbacks"]


class Callback:
    """Told of what happens in a training; override what you care about.

    Under torchrun each process tells its own callbacks, and all are told the same; `trainer.is_first` says whether this
    is the process that speaks for all. An exception in a callback is warned about, once for each place, and training
    goes on; `strict = True` lets it end the training.
    """

    strict = False

    def on_train_begin(self, trainer: Trainer) -> None:
        """All is ready, and what is resumed from is loaded: `trainer.step`."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """A step begins; its batch is asked for next."""

    def on_pre_optimizer_step(self, trainer: Trainer) -> None:
        """Gradients are there and clipped; weights have not changed yet."""

    def on_step_end(self, trainer: Trainer, reading: Reading) -> None:
        """A step is done, with its update."""

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Every `log_every` steps: the figures of the step, and means since the last time."""

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """A validation is done."""

    def on_record(self, trainer: Trainer, page: Path) -> None:
        """The timeline of a step was written."""

    def on_save(self, trainer: Trainer, step: int, folder: Path) -> None:
        """A checkpoint is complete."""

    def on_fault(self, trainer: Trainer, fault: Mapping[str, Any]) -> None:
        """Something went wrong; training goes on, or is about to end with an error."""

    def on_recover(self, trainer: Trainer, step: int) -> None:
        """Training goes on from a checkpoint."""

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """All is done and saved."""

    def close(self) -> None:
        """The training has ended, in whatever way: let go of files and terminals."""


class Callbacks:
    """Several callbacks, told one after the other."""

    def __init__(self, given: Iterable[Callback]) -> None:
        self._all = list(given)
        wrong = [one for one in self._all if not isinstance(one, Callback)]
        if wrong:
            raise UsageError(f"callbacks: give penstock.Callback objects; given: {type(wrong[0]).__name__}")
        self._warned: set[tuple[int, str]] = set()

    def tell(self, name: str, trainer: Trainer, *what: Any) -> None:  # noqa: ANN401 - as the method takes
        """Call a method of each."""
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
        """Close all of them; one that cannot be closed is passed over."""
        for callback in self._all:
            with suppress(Exception):
                callback.close()

    def _warn(self, callback: Callback, name: str, error: Exception) -> None:
        if (id(callback), name) in self._warned:
            return
        self._warned.add((id(callback), name))
        warn_user(
            f"{type(callback).__name__}.{name} raised {error_in_short(error)}; training goes on. "
            "It is told once; strict = True in the callback makes it end the training"
        )
