"""TensorBoard: a callback that writes the figures of a training for TensorBoard; an optional extra."""

# ruff: noqa: ARG002
# (callbacks ignore some arguments)

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError
from penstock.training.callbacks.callback import Callback, Summary
from penstock.training.callbacks.charts import charted, charted_validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from penstock.training.trainer import Trainer


class TensorBoard(Callback):
    """Writes loss, learning rate, speed, bubble, memory of each lane and validation; only the first process writes.

    The files go to `tensorboard/` in the run folder: `tensorboard --logdir RUN/tensorboard` shows them. A training that
    resumes replaces the steps that it runs again.

    Args:
        folder: another folder for the files.

    Raises:
        UsageError: if TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        if find_spec("tensorboard") is None:
            raise UsageError("TensorBoard is not installed; run: pip install 'penstock[tensorboard]'")
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def on_train_begin(self, trainer: Trainer) -> None:
        """Open the file."""
        if not trainer.is_first:
            return
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        folder = trainer.folder.path / "tensorboard" if self._folder is None else Path(self._folder)
        self._writer = SummaryWriter(str(folder), purge_step=trainer.step + 1 if trainer.step else None)

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Write the figures of a step."""
        for name, value in charted(figures):
            self._add(name, value, trainer.step)

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Write the result of a validation."""
        for name, value in charted_validation(figures):
            self._add(name, value, trainer.step)

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file, also after an error."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)
