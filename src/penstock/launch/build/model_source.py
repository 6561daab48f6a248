"""Model source: the model that a configuration names: from a callable, from transformers, or the small GPT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import UsageError, nearest
from penstock.launch.build.small_gpt import load_text, make_gpt
from penstock.launch.build.user_callables import call, check_arguments
from penstock.model.small_models.named_models import checked, class_of, config_of

if TYPE_CHECKING:
    from torch import nn

    from penstock.launch.config.config import Config


def build_model(config: Config) -> tuple[nn.Module, Any]:
    """Return the model, and the example batch that the callable returns with it, or None.

    Raises:
        UsageError: if the model does not exist or its arguments are wrong.
    """
    name, arguments = config.model, config.model_args
    if name == "penstock:gpt":
        given = {"num_characters": len(load_text().characters), **arguments}
        check_arguments("model", "penstock:gpt", make_gpt, given)
        return make_gpt(**given), None
    if isinstance(name, str) and ":" in name:
        made = call("model", name, arguments)
        try:
            return checked(name, made)
        except UsageError as error:
            raise UsageError(f"model: {error}") from None
    return _from_transformers(_settings(name, arguments)), None


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
