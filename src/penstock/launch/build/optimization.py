"""Optimization: the loss, the optimizer and the learning-rate schedule that a configuration names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, nearest
from penstock.launch.build.small_gpt import loss_of
from penstock.launch.build.user_callables import check_arguments, find_callable

if TYPE_CHECKING:
    import torch

    from penstock.launch.config.config import Config


def build_loss(config: Config) -> Any:  # noqa: ANN401 - a function, or None
    """Return the loss function, or None if the model returns its loss.

    Raises:
        UsageError: if the loss does not exist.
    """
    from torch import nn

    name = config.loss
    if name == "auto":
        name = "penstock:next_token" if config.model == "penstock:gpt" else "model"
    if name == "model":
        return None
    if name == "penstock:next_token":
        return loss_of
    if ":" in name:
        found = find_callable("loss", name)
        return found() if isinstance(found, type) else found
    losses = [word for word in dir(nn) if word.endswith("Loss")]
    functions = [word for word in dir(nn.functional) if word.endswith(("_loss", "cross_entropy", "kl_div"))]
    if name in losses:
        return getattr(nn, name)()
    if name in functions:
        return getattr(nn.functional, name)
    raise UsageError(
        f"loss: {name!r} is not a loss of torch.nn.functional or torch.nn.{nearest(name, [*functions, *losses])}"
    )


def build_weight(config: Config) -> Any:  # noqa: ANN401 - a function, "sum", or None
    """Return the `weight=` of the pipeline: what the losses of micro-batches average over.

    Raises:
        UsageError: if the callable does not exist.
    """
    if config.weight in (None, "sum"):
        return config.weight
    return find_callable("weight", config.weight)


def optimizer_maker(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes the optimizer from parameters.

    Raises:
        UsageError: if the optimizer does not exist or does not take the arguments.
    """
    import torch

    arguments = {"lr": config.lr, **config.optimizer_args}
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    name = config.optimizer
    if ":" in name:
        found = find_callable("optimizer", name)
    else:
        known = {word.lower(): word for word in dir(torch.optim) if _is_optimizer(word)}
        if name.lower() not in known:
            raise UsageError(f"optimizer: {name!r} is not one of torch.optim.{nearest(name, known.values())}")
        found = getattr(torch.optim, known[name.lower()])
    check_arguments("optimizer", name, found, arguments, [])

    def make(parameters: Any) -> torch.optim.Optimizer:  # noqa: ANN401 - as torch takes them
        made = found(list(parameters), **arguments)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"optimizer: {name} returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made

    return make


def _is_optimizer(word: str) -> bool:
    import torch

    found = getattr(torch.optim, word)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def build_rate(config: Config, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401 - torch's have no common type
    """Return the learning-rate schedule, or None if the rate is constant."""
    from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

    name, steps, warmup = config.lr_schedule, config.steps, config.warmup_steps
    if ":" in name:
        found = find_callable("lr_schedule", name)
        check_arguments("lr_schedule", name, found, {"steps": steps}, optimizer)
        return found(optimizer, steps=steps)
    if name == "one_cycle":
        share = warmup / steps if warmup else 0.3

        class OneCycle(OneCycleLR):
            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                # the state contains the end of its own curve; the current number of steps takes precedence
                own = {name: vars(self)[name] for name in ("total_steps", "_schedule_phases")}
                super().load_state_dict({**state_dict, **own})

        return OneCycle(optimizer, config.lr, total_steps=steps + 1, pct_start=share)
    if name == "constant" and not warmup:
        return None

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / (warmup + 1)
        share = (done - warmup) / max(1, steps - warmup)
        falls = {"constant": 1.0, "linear": 1.0 - share, "cosine": 0.5 * (1.0 + math.cos(math.pi * share))}
        return max(0.0, falls[name])

    return LambdaLR(optimizer, factor)
