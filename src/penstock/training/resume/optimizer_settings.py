"""Optimizer settings: compare the settings that an optimizer was made with and those from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Settings = list[dict[str, Any]]

_SCHEDULED = "by schedule"


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> Settings:
    """Return the settings of all groups."""
    found = []
    for group in (group for one in optimizers for group in one.param_groups):
        plain: dict[str, Any] = {
            name: value for name, value in group.items() if isinstance(value, (Number, tuple, list))
        }
        plain.pop("params", None)
        found.append(plain)
    return found


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
