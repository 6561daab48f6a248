"""Training: a loop around a pipeline that saves, shows, and survives."""

from penstock.training.callbacks import Callback
from penstock.training.reading import Reading, Summary
from penstock.training.trainer import Trainer

__all__ = ["Callback", "Reading", "Summary", "Trainer"]
