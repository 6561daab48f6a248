"""Resuming: choose the checkpoint that a training resumes from, and report changed optimizer settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.manifest import MisfitError
from penstock.errors import UsageError, warn_user
from penstock.torchrun import attempt
from penstock.training.resume.optimizer_settings import changes, settings_of

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint import Checkpoints, Restored


def resume(
    checkpoints: Checkpoints, source: str, folder: Path, optimizers: Sequence[torch.optim.Optimizer]
) -> Restored | None:
    """Restore the right checkpoint; return None if the training starts anew.

    Args:
        checkpoints: the checkpoints of the training.
        source: "auto", "never", or the folder of a checkpoint.
        folder: the run folder.
        optimizers: a warning lists their settings that the checkpoint has changed.

    Raises:
        UsageError: if there are checkpoints, but `source` is "never".
    """
    is_restart = attempt() > 0  # `source` applies only to the first start
    if source == "never":
        if checkpoints.steps() and not is_restart:
            raise UsageError(
                f'{folder}: has checkpoints of an earlier training, but resume is "never": choose another folder, or '
                'resume="auto"'
            )
        if not is_restart:
            return None
        source = "auto"
    if source != "auto" and checkpoints.steps():
        is_own = Path(source).resolve().parent == folder.resolve()
        if not is_own or is_restart:
            source = "auto"  # the run started from `source` and has its own checkpoints since
    before = settings_of(optimizers)
    try:
        restored = checkpoints.restore("newest" if source == "auto" else source)
    except MisfitError as error:
        if source != "auto":
            raise
        raise MisfitError(
            f"{error}. {folder} contains the run of another training: choose another folder, or remove this one"
        ) from error
    if restored is not None and (changed := changes(before, settings_of(optimizers))):
        warn_user(
            f"the optimizer uses the settings of the checkpoint: {'; '.join(changed)}. To change them, set them in a "
            "callback's on_train_begin, or start a new run"
        )
    return restored
