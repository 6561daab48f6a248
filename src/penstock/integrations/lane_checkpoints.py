"""Lane checkpoints: the part of another library's checkpoint that any number of lanes can load."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoint import Checkpoints
from penstock.errors import OutputError
from penstock.pipeline.pipeline import Pipeline


def save_lanes(folder: Path, pipe: Pipeline, step: int, *, optimizer: Any, scheduler: Any = None) -> None:
    """Write weights, optimizer and scheduler by name; replace what the folder held.

    Raises:
        OutputError: if the checkpoint cannot be written.
    """
    if 0 in pipe.lanes and folder.exists():
        shutil.rmtree(folder)
    pipe.internals.gather(None)  # no process writes before the folder is gone
    with Checkpoints(folder, pipe, optimizer=optimizer, scheduler=scheduler) as checkpoints:
        checkpoints.save(step, wait=True)
        if checkpoints.failures:
            raise OutputError(checkpoints.failures[0])


def load_lanes(
    folder: Path, pipe: Pipeline, parts: Sequence[str], *, optimizer: Any = None, scheduler: Any = None
) -> bool:
    """Load some parts of what `save_lanes` wrote; return whether there is such a checkpoint."""
    with Checkpoints(folder, pipe, optimizer=optimizer, scheduler=scheduler) as checkpoints:
        return checkpoints.restore(parts=parts) is not None
