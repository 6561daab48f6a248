"""Named parts: the model, the loss, the optimizer and the learning-rate schedule that a configuration names.

A name that does not exist, or that does not take its arguments, raises a UsageError.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from penstock.errors import UsageError, nearest
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt
from penstock.model.small_models.folder_model import folder_of, model_from_folder
from penstock.model.small_models.named_models import checked, class_of, config_of, find

if TYPE_CHECKING:
    from penstock.launch.config.config import Config


def find_callable(key: str, name: str) -> Callable[..., Any]:
    """Return the callable that a key names; raise a UsageError if it does not exist."""
    try:
        found: Callable[..., Any] = find(name)
    except UsageError as error:
        raise UsageError(f"{key}: {error}") from error
    return found


def call(key: str, name: str, arguments: Mapping[str, Any], *positional: object) -> Any:  # noqa: ANN401 - what it returns
    """Call the callable that a key names; its own exceptions pass through."""
    function = find_callable(key, name)
    check_arguments(key, name, function, arguments, *positional)
    return function(*positional, **arguments)


def check_arguments(
    key: str, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], *positional: object
) -> None:
    """Refuse arguments that a callable does not take, or that it needs and lacks."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some built-in functions have no signature
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        names = [n for n, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        hints = "".join(nearest(word, names) for word in arguments if word not in names)
        raise UsageError(f"{key}_args: {name} does not take these: {error}.{hints} It takes {signature}") from None


# ---- the model


def build_model(config: Config) -> tuple[nn.Module, Any]:
    """Return the model, and the example batch that the callable returns with it, or None."""
    name, arguments = config.model, config.model_args
    if name == "penstock:gpt":
        given = {"num_characters": len(load_text().characters), **arguments}
        check_arguments("model", "penstock:gpt", make_gpt, given)
        return make_gpt(**given), None
    folder = folder_of(name)
    if folder is not None:
        try:
            return model_from_folder(folder, arguments), None
        except UsageError as error:
            raise UsageError(f"model: {error}") from error
    if isinstance(name, str) and ":" in name:
        made = call("model", name, arguments)
        try:
            return checked(name, made)
        except UsageError as error:
            raise UsageError(f"model: {error}") from None
    return _from_transformers(_settings(name, arguments)), None


def weights_of(config: Config) -> str | None:
    """Return the file or folder of the weights: that of the configuration, or else the folder of an hf: model."""
    return folder_of(config.model) if config.weights is None else config.weights


def _settings(model: str | Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a transformers config, including model_type."""
    if isinstance(model, Mapping):
        return dict(model)
    if not model.endswith(".json"):
        return {"model_type": model, **arguments}
    try:
        found = json.loads(Path(model).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"model: {model} cannot be read as a config: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UsageError(f"model: {model} has no model_type, so it is not a config of transformers")
    return found | dict(arguments)


def _from_transformers(settings: dict[str, Any]) -> nn.Module:
    kind = settings.pop("model_type")
    try:
        plain = config_of(kind)
    except UsageError as error:
        raise UsageError(f"model: {error}") from error
    for name in settings:
        if not hasattr(plain, name) and name not in ("architectures", "transformers_version", "torch_dtype", "dtype"):
            raise UsageError(f"model_args: a config of {kind} has no {name!r}.{nearest(name, vars(plain))}")
    config = type(plain)(**settings)
    config.use_cache = False  # the cache is for generation; training does not use it
    return class_of(config)(config)  # type: ignore[no-any-return]


# ---- the loss


def build_loss(config: Config) -> Any:  # noqa: ANN401 - a function, or None
    """Return the loss function, or None if the model returns its loss."""
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
    """Return the `weight=` of the pipeline: what the losses of micro-batches average over."""
    if config.weight in (None, "sum"):
        return config.weight
    return find_callable("weight", config.weight)


# ---- the optimizer and its rate


def optimizer_maker(config: Config) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes the optimizer from parameters."""
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
    found = getattr(torch.optim, word)
    return isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer


def build_rate(config: Config, optimizer: torch.optim.Optimizer) -> Any:  # noqa: ANN401 - torch's have no common type
    """Return the learning-rate schedule, or None if the rate is constant."""
    name, steps, warmup = config.lr_schedule, config.steps, config.warmup_steps
    if ":" in name:
        return call("lr_schedule", name, {"steps": steps}, optimizer)
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
