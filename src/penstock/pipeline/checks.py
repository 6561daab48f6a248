"""Checks: what can be seen to be wrong with a pipeline's arguments before anything is done."""

from __future__ import annotations

from typing import get_args

import torch
from torch import nn

from penstock.errors import UsageError, nearest
from penstock.schedule.lower import Keep

__all__ = ["check_seconds", "check_switches", "check_words"]


def check_words(model: object, keep: object, optimizer: object, memory_limit: object) -> None:
    """Say what is wrong with a model, a keep policy or an optimizer.

    Raises:
        UsageError: when one of them is nothing that could be used.
    """
    if not isinstance(model, (nn.Module, list, tuple)):
        raise UsageError(f"model: give an nn.Module, or a list of stage modules; given: {type(model).__name__}")
    words = (*get_args(Keep), "fit")
    if isinstance(keep, str) and keep not in words:
        raise UsageError(f"keep: {keep!r} is not one of {', '.join(words)}.{nearest(keep, words)}")
    if keep == "fit" and memory_limit is None:
        raise UsageError('keep: "fit" recomputes what does not fit: say what does, with memory_limit=')
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise UsageError("optimizer: give a function that makes one of a list of parameters, not an optimizer")


def check_switches(*, graphs: object, autocast: object, scaler: object, deferred_batch_norm: object) -> None:
    """Say which of these could not be used; a step would find out late, and say it in torch's words.

    Raises:
        UsageError: when there are any.
    """
    faults = []
    if not isinstance(graphs, bool) and graphs != "auto":
        faults.append(f"graphs: {graphs!r:.40} is neither True nor False nor 'auto'")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        faults.append(f"autocast: give a dtype, as torch.bfloat16; given: {autocast!r:.40}")
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        faults.append(f"scaler: give a torch.amp.GradScaler; given: {type(scaler).__name__}")
    if not isinstance(deferred_batch_norm, bool):
        faults.append(f"deferred_batch_norm: {deferred_batch_norm!r:.40} is neither True nor False")
    if faults:
        raise UsageError("; ".join(faults))


def check_seconds(timeout: object) -> float:
    """Return a timeout in seconds.

    Raises:
        UsageError: when it is none.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"timeout: must be more than 0 seconds; given: {timeout!r}")
    return float(timeout)
