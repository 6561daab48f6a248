"""Resuming: the checkpoint and the position in the data that a training resumes from, and changed settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, warn_user
from penstock.feeding.feed import Feed
from penstock.tensor_files.manifest import MisfitError
from penstock.torchrun import attempt

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint import Checkpoints, Restored

Settings = list[dict[str, Any]]

_SCHEDULED = "by schedule"


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


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> Settings:
    """Return the settings of all groups."""
    kinds = (Number, tuple, list)
    groups = [group for one in optimizers for group in one.param_groups]
    return [{n: value for n, value in g.items() if isinstance(value, kinds) and n != "params"} for g in groups]


def changes(before: Settings, after: Settings) -> list[str]:
    """Describe the settings that differ now, each once.

    >>> changes([{"lr": 5.0, "betas": (0.9, 0.95)}], [{"lr": 0.001, "betas": (0.9, 0.95)}])
    ['lr 0.001, not 5.0']
    >>> changes([{"lr": 0.2, "initial_lr": 0.1}], [{"lr": 0.3, "initial_lr": 0.1}])  # a scheduler changes it
    []
    """
    differences = [
        f"{name} {new[name]}, not {old[name]}"
        for own, other in zip(before, after, strict=False)
        for old, new in ((_original(own, other), _original(other, own)),)
        for name in old
        if name in new and old[name] != new[name]
    ]
    return list(dict.fromkeys(differences))


def _original(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the original settings: undo values that schedulers change in every step."""
    kept = dict(settings)
    rate = kept.pop("initial_lr", None)
    if rate is not None and "initial_lr" in other:
        kept["lr"] = rate
    if "max_momentum" in settings and "max_momentum" in other:
        kept.pop("momentum", None)
        if "betas" in kept:
            kept["betas"] = (_SCHEDULED, *kept["betas"][1:])
    return kept


class DataPosition:
    """The position in a feed, in the form that a checkpoint saves and restores."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._is_kept = feed, False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the context is active, restoring a checkpoint keeps the current position instead of the saved one."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position in the next iteration; raise a UsageError if the data is different."""
        if self._is_kept:
            return
        try:
            self._feed.load_state_dict(state)
        except UsageError as error:
            raise UsageError(f"{error}; resume_data=False starts a new epoch") from None
