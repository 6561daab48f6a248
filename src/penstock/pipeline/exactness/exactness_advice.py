"""Exactness advice: the option that makes a batch exact in micro-batches, and hints for faulty losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.example import Call
from penstock.model.structure import flatten
from penstock.pipeline.exactness.loss_samples import FEW
from penstock.pipeline.exactness.scoring import Run, largest_difference, parts_of
from penstock.runtime.deterministic import Deterministic
from penstock.runtime.micro_batches import join_results


def broadcast_of(run: Run, target: tuple[Any, ...]) -> str:
    """Return a hint if the target has another shape than the output, since this may be the cause."""
    output, labels = run.output, target[0] if len(target) == 1 else None
    if not isinstance(output, torch.Tensor) or not isinstance(labels, torch.Tensor) or output.shape == labels.shape:
        return ""
    return (
        f" The target {tuple(labels.shape)} is broadcast against the output {tuple(output.shape)}, so that each sample "
        "is compared with the targets of all samples: give both the same shape."
    )


def balances_experts(model: nn.Module) -> bool:
    """Return whether a model of transformers adds a load-balancing loss over the whole batch to its loss.

    Its share of the loss is so small that rounding may hide it, but its share of the router's gradient is large.
    """
    config = getattr(model, "config", None)
    return model.training and any(
        getattr(one, "output_router_logits", False) is True and bool(getattr(one, "router_aux_loss_coef", 0))
        for one in (config, getattr(config, "text_config", None))
    )


def check_own_weight(loss: object, size: int) -> None:
    """Refuse a loss of torch whose weight has an entry per sample of the batch, which does not fit a micro-batch."""
    weight = getattr(loss, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.dim() > 1 and weight.shape[0] == size > 1:
        raise UsageError(
            f"loss: its weight {tuple(weight.shape)} has an entry for each of the {size} samples of a batch, but a "
            "micro-batch has fewer. Pass it in the target, or pass loss_over='batch'"
        )


def option_for(model: nn.Module, call: Call) -> str:
    """Return the option that makes the example exact, found by trials on the plain model; empty if none does."""
    for name, dim in zip(call.names, call.batch_dims, strict=True):
        if dim is None or name == call.batch_name:
            continue
        place = call.names.index(name)
        dims = (*call.batch_dims[:place], None, *call.batch_dims[place + 1 :])
        if _is_exact(model, replace(call, batch_dims=dims)):
            return f"whole=[{name!r}] makes it exact: every micro-batch then gets {name} whole"
    first = call.tensors[call.names.index(call.batch_name)]
    for dim in range(min(3, first.dim())):
        dims = tuple(dim if t.dim() > dim and t.shape[dim] == first.shape[dim] else None for t in call.tensors)
        if dim != call.batch_dim and _is_exact(model, replace(call, batch_dims=dims, batch_size=int(first.shape[dim]))):
            return f"batch_dim={dim} makes it exact: dimension {dim} of {call.batch_name} is then the batch"
    return ""


def advice_for(call: Call) -> str:
    """Return the possible causes if no option makes the example exact."""
    shape = tuple(call.tensors[call.names.index(call.batch_name)].shape)
    return (
        f"is dimension {call.batch_dim} of {call.batch_name} {shape} the batch? batch_dim= sets it, "
        "whole=[...] names arguments that every micro-batch gets whole, and split= cuts batches that do not stack "
        "samples. A model that mixes the samples of a batch sees only those of a micro-batch; micro_batches=1 runs the "
        "whole batch"
    )


def _is_exact(model: nn.Module, call: Call) -> bool:
    """Return whether the plain model returns the same for a call and for its parts."""
    if call.batch_size < 2 or isinstance(model, nn.ModuleList):
        return False

    def run(given: Call) -> list[torch.Tensor]:
        args, kwargs = given.arguments()
        return flatten(model(*args, **kwargs))[0]

    few = call.rows(list(range(min(FEW, call.batch_size))))
    sizes = [few.batch_size // 2, few.batch_size - few.batch_size // 2]
    try:
        with Deterministic() as deterministic:
            whole, parts = run(few), [run(part) for part in parts_of(few, sizes)]
        joined = join_results(parts, sizes, call.batch_dim)
    except Exception:  # the model may fail on some cuts
        return False
    same = all(one.shape == other.shape for one, other in zip(whole, joined, strict=True))
    return same and not deterministic.is_random and not largest_difference(whole, joined)
