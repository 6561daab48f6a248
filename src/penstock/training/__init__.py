"""Training: a training loop around a pipeline that saves, reports and survives faults."""

from typing import TYPE_CHECKING, Any

from penstock.training.callbacks.callback import Callback, Reading, Summary
from penstock.training.callbacks.journal import Journal
from penstock.training.callbacks.tensorboard import TensorBoard
from penstock.training.view.view import View

if TYPE_CHECKING:
    from penstock.training.trainer import Trainer

__all__ = ["Callback", "Journal", "Reading", "Summary", "TensorBoard", "Trainer", "View"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    """Import the trainer on first use: a configuration is checked without torch."""
    if name == "Trainer":
        from penstock.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'penstock.training' has no attribute {name!r}")
