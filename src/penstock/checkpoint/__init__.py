"""Checkpoints: save a training's state to disk and restore it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.checkpoints import Checkpoints
from penstock.checkpoint.reader import Restored

if TYPE_CHECKING:
    from penstock.checkpoint.formats.exchange import export_checkpoint, import_weights

__all__ = ["Checkpoints", "Restored", "export_checkpoint", "import_weights"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a function
    """Import the functions for other formats on first use."""
    if name in ("export_checkpoint", "import_weights"):
        return getattr(import_module("penstock.checkpoint.formats.exchange"), name)
    raise AttributeError(f"module 'penstock.checkpoint' has no attribute {name!r}")
