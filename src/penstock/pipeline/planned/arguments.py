"""Arguments: checks of a pipeline's arguments before anything runs, and the warning about missing caches."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from penstock.errors import UsageError, nearest, warn_user
from penstock.model.capture.capture import Captured
from penstock.schedule.actions import Kind
from penstock.schedule.keep_policies import CHOSEN_BY_NODE, POLICIES
from penstock.schedule.schedule import Schedule

LossOver = Literal["micro_batch", "batch"]


def check_model_options(model: object, keep: object, optimizer: object, memory_limit: object) -> None:
    """Check the model, the keep policy and the optimizer."""
    if not isinstance(model, (nn.Module, list, tuple)):
        raise UsageError(f"model: pass an nn.Module, or a list of stage modules; given: {type(model).__name__}")
    if isinstance(keep, str) and keep not in POLICIES:
        raise UsageError(f"keep: {keep!r} is not one of {', '.join(POLICIES)}.{nearest(keep, tuple(POLICIES))}")
    if keep == CHOSEN_BY_NODE and memory_limit is None:
        raise UsageError('keep: "fit" needs memory_limit=: it recomputes only as many nodes as the limit requires')
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise UsageError(
            "optimizer: pass a function that makes an optimizer from a list of parameters, not an optimizer"
        )


def check_switches(*, graphs: object, autocast: object, scaler: object, deferred_batch_norm: object) -> None:
    """Check these arguments early; otherwise the first step would fail with an error of torch."""
    faults = []
    if not isinstance(graphs, bool) and graphs != "auto":
        faults.append(f"graphs: {graphs!r:.40} is neither True nor False nor 'auto'")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        faults.append(f"autocast: pass a dtype, such as torch.bfloat16; given: {autocast!r:.40}")
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        faults.append(f"scaler: pass a torch.amp.GradScaler; given: {type(scaler).__name__}")
    if not isinstance(deferred_batch_norm, bool):
        faults.append(f"deferred_batch_norm: {deferred_batch_norm!r:.40} is neither True nor False")
    if faults:
        raise UsageError("; ".join(faults))


def check_seconds(timeout: object) -> float:
    """Return a timeout in seconds.

    Raises:
        UsageError: if it is not a positive number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise UsageError(f"timeout: must be more than 0 seconds; given: {timeout!r}")
    return float(timeout)


def check_loss_over(loss_over: object, schedule: Schedule, *, loss: object, weight: object) -> None:
    """Check `loss_over`, and whether the loss and the schedule allow a loss on the whole batch.

    Raises:
        UsageError: if `loss_over` is invalid or they do not allow it.
    """
    words = get_args(LossOver)
    if loss_over not in words:
        raise UsageError(f"loss_over: {loss_over!r:.40} is not one of {', '.join(words)}")
    if loss_over == "micro_batch":
        return
    if loss is None:
        raise UsageError(
            'loss_over: "batch" needs loss=, a function of the outputs and the target of the whole batch; a loss '
            "inside the model sees only one micro-batch"
        )
    if weight is not None:
        raise UsageError('weight: has no effect with loss_over="batch", which sees the whole batch; leave it out')
    last = schedule.num_stages - 1
    lane = schedule.ways[0][last]
    kinds = [action.kind for action in schedule.lanes[lane] if action.stage == last]
    backward = next((at for at, kind in enumerate(kinds) if kind in (Kind.B, Kind.I)), len(kinds))
    if len(schedule.ways) > 1 or schedule.versions is not None or Kind.F in kinds[backward:]:
        raise UsageError(
            f'loss_over: "batch" needs a schedule in which the last stage runs all its forwards before its first '
            f"backward, but {schedule.name} does not: use zb_gpipe, gpipe or looped_bfs"
        )


_CACHES = ("past_key_values", "cache_params", "mems", "state")  # the names in outputs of transformers


def warn_of_cache(output: object, captured: Captured) -> None:
    """Warn if the plain model would return a cache of keys and values, or of states. Stages return no caches."""
    configs = [getattr(module, "config", None) for module in captured.model.modules()]
    is_asked_for = captured.call.constants.get("use_cache") is True
    if not is_asked_for and not any(getattr(config, "use_cache", None) is True for config in configs):
        return
    empty = [name for name in _CACHES if getattr(output, name, output) is None]
    if empty:
        warn_user(
            f"the model is set to return a cache (use_cache=True), but a pipeline returns none: {empty[0]} is None in "
            "its output. To generate text, call the model itself. To turn this warning off, set use_cache=False in the "
            "model's config"
        )
