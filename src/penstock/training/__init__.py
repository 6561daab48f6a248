"""Training: a training loop around a pipeline that saves, reports and survives faults."""

from typing import TYPE_CHECKING, Any

from penstock.training.callbacks.callback import Callback, Reading, Summary
from penstock.training.callbacks.journal import Journal
from penstock.training.callbacks.tensorboard import TensorBoard
from penstock.training.callbacks.weights_and_biases import WeightsAndBiases
from penstock.training.view.view import View

if TYPE_CHECKING:
    from penstock.training.averaged_weights import AveragedWeights
    from penstock.training.trainer import Trainer

__all__ = [
    "AveragedWeights", "Callback", "Journal", "Reading", "Summary", "TensorBoard", "Trainer", "View",
    "WeightsAndBiases",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class
    """Import what needs torch on first use: a configuration is checked without torch."""
    if name == "AveragedWeights":
        from penstock.training.averaged_weights import AveragedWeights

        return AveragedWeights
    if name == "Trainer":
        from penstock.training.trainer import Trainer

        return Trainer
    raise AttributeError(f"module 'penstock.training' has no attribute {name!r}")
