"""Resume: which checkpoint a training goes on from, and what of the optimizer comes from there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.misfit import MisfitError
from penstock.errors import UsageError, warn_user
from penstock.torchrun import attempt
from penstock.training.resume.optimizer_settings import changes, settings_of

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint import Checkpoints, Restored

__all__ = ["resume"]


def resume(
    checkpoints: Checkpoints, source: str, folder: Path, optimizers: Sequence[torch.optim.Optimizer]
) -> Restored | None:
    """Take up the checkpoint that is asked for; None where a training begins afresh.

    Args:
        checkpoints: of the training.
        source: "auto", "never", or the folder of a checkpoint.
        folder: of the run.
        optimizers: whose settings come from the checkpoint; a warning says which are others now.

    Raises:
        UsageError: when there are checkpoints, and none is to be taken up.
    """
    is_again = attempt() > 0  # what was asked for was for the first start
    if source == "never":
        if checkpoints.steps() and not is_again:
            raise UsageError(
                f"{folder}: has checkpoints of an earlier training, and resume is never: choose another folder, or "
                'resume="auto"'
            )
        if not is_again:
            return None
        source = "auto"
    if source != "auto" and checkpoints.steps():
        is_own = Path(source).resolve().parent == folder.resolve()
        if not is_own or is_again:
            source = "auto"  # it began from there, and has come further since
    before = settings_of(optimizers)
    try:
        restored = checkpoints.restore("newest" if source == "auto" else source)
    except MisfitError as error:
        if source != "auto":
            raise
        raise MisfitError(
            f"{error}. {folder} holds the run of another training: give another folder, or remove this one"
        ) from error
    if restored is not None and (changed := changes(before, settings_of(optimizers))):
        warn_user(
            f"the optimizer goes on with the settings of the checkpoint: {'; '.join(changed)}. To change them, set "
            "them in a callback's on_train_begin, or begin a new run"
        )
    return restored
