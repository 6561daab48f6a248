"""Checkpoints: the state of a training on disk, complete or not there at all."""

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.reader import Restored

__all__ = ["Checkpoints", "Restored"]
