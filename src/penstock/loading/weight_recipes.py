"""Weight recipes: which stored tensors make each tensor of a model, by its own names or by those of transformers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from penstock.errors import CheckpointError, UsageError, error_in_short
from penstock.loading.weight_files import WeightFiles

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """How one or more tensors of the model are made from stored tensors."""

    targets: tuple[str, ...]  # names in the model
    keys: tuple[str, ...]  # names in the files
    # returns the targets by name, from a function that reads a key; None: the only key is the only target
    convert: Callable[[Read], Mapping[str, torch.Tensor]] | None = None


@dataclass(frozen=True)
class Recipes:
    """All recipes, by the names of the tensors that they make, and the stored tensors that the model does not have."""

    of: Mapping[str, Recipe]
    unused: Sequence[str]


def recipes_of(model: nn.Module, files: WeightFiles) -> Recipes:
    """Return the recipes of a model.

    Raises:
        UsageError: if the files hold a model of another architecture.
    """
    is_checkpoint = files.aliases is not None  # its names are already those of the model
    if is_of_transformers(model) and not is_checkpoint:
        return _TransformersNames(cast("Any", model), files).recipes()
    named = _known(model)
    stored = {**{name: name for name in files.shapes}, **(files.aliases or {})}
    return Recipes(
        {name: Recipe((name,), (key,)) for name, key in stored.items() if name in named},
        [name for name in files.shapes if name not in named],
    )


def _known(model: nn.Module) -> set[str]:
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} | buffers


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a module is a model of transformers; the package is not imported for this."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


@dataclass
class _Group:
    """The stored tensors that one converter of transformers takes."""

    converter: Any
    entries: list[tuple[str, str]] = field(default_factory=list)  # name in the file, and the pattern that it matches


class _TransformersNames:
    """The names of a transformers model in its files, translated as `from_pretrained` does."""

    def __init__(self, model: Any, files: WeightFiles) -> None:  # noqa: ANN401 - a PreTrainedModel
        self._model, self._files = model, files
        self._check_config()
        self._known: dict[str, torch.Tensor] = model.state_dict()
        self._recipes: dict[str, Recipe] = {}
        self._groups: dict[str, _Group] = {}
        self._unused: list[str] = []

    def _check_config(self) -> None:
        settings = self._files.settings or {}
        kind, own = settings.get("model_type"), getattr(self._model.config, "model_type", None)
        if kind and own and kind != own:
            made = ", ".join(settings.get("architectures") or ()) or kind
            raise UsageError(
                f"weights: {self._files.path} holds a {made} (model_type {kind}), but the model is a "
                f"{type(self._model).__name__} (model_type {own})"
            )

    def recipes(self) -> Recipes:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        converter_of = {pattern: one for one in converters for pattern in one.source_patterns}
        for key in sorted(self._files.shapes, key=dot_natural_key):
            name, pattern = self._translated(key, renamings, converters)
            if name not in self._known:
                self._unused.append(key)
            elif pattern is None:
                self._recipes[name] = Recipe((name,), (key,))
            else:
                group = self._groups.setdefault(name, _Group(copy.deepcopy(converter_of[pattern])))
                group.entries.append((key, pattern))
        for name, group in self._groups.items():
            self._add(name, group)
        # so that `save_pretrained` of the model reverts the same changes, and no others
        self._model._weight_conversions = [one for one in mapping if one.was_used()]
        return Recipes(self._recipes, self._unused)

    def _translated(self, key: str, renamings: Any, converters: Any) -> tuple[str, str | None]:  # noqa: ANN401
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, self._known)
        if name not in self._known and key in self._known:
            name, pattern = rename_source_key(key, [], [], prefix, self._known)
        return name, pattern

    def _add(self, first: str, group: _Group) -> None:
        """Add the recipe of a group; `first` is the name of its first target."""
        patterns = group.converter.target_patterns
        targets = tuple(first.replace(patterns[0], pattern, 1) for pattern in patterns)
        dtype = self._known[first].dtype

        def convert(read: Read) -> Mapping[str, torch.Tensor]:
            converter = copy.deepcopy(group.converter)
            for key, pattern in group.entries:
                converter.add_tensor(first, key, pattern, _later(read, key, dtype))
            try:
                made = converter.convert(first, model=self._model, config=self._model.config)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{self._files.path}: {first} cannot be made from {len(group.entries)} stored tensors: "
                    f"{error_in_short(error)}"
                ) from error
            return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

        recipe = Recipe(targets, tuple(key for key, _ in group.entries), convert)
        self._recipes |= dict.fromkeys(targets, recipe)


def _later(read: Read, key: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: read(key).to(dtype)
