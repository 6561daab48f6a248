"""Shell: a second set of a model's modules over the same tensors, so that a stage can change what it needs to."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

__all__ = ["make_shell"]


def make_shell(model: nn.Module) -> nn.Module:
    """Copy a model's modules, and only these: tensors and all other attributes are shared.

    Lists and dicts that hold modules, and methods bound to modules, are made anew around the copies. A configuration
    with caches on is copied with caches off: stages have no use for them.
    """
    copies: dict[int, Any] = {}
    keep: list[object] = []  # so that no id is used twice while we copy

    def convert(item: Any) -> Any:  # noqa: ANN401
        if isinstance(item, nn.Module):
            return copies[id(item)] if id(item) in copies else copy_module(item)
        if isinstance(item, types.MethodType) and isinstance(item.__self__, nn.Module):
            return types.MethodType(item.__func__, convert(item.__self__))
        if type(item) in (list, tuple, dict) and _holds_module(item):
            if isinstance(item, dict):
                return {key: convert(value) for key, value in item.items()}
            return type(item)(convert(value) for value in item)
        if getattr(item, "use_cache", None) is True and not callable(item):
            if id(item) not in copies:
                copies[id(item)] = copy.copy(item)
                copies[id(item)].use_cache = False
                keep.append(item)
            return copies[id(item)]
        return item

    def copy_module(module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module  # no Python object that could be copied
        made = module.__class__.__new__(module.__class__)
        copies[id(module)] = made
        attributes = vars(made)
        for key, value in vars(module).items():
            if key == "_modules":
                attributes[key] = {name: None if child is None else convert(child) for name, child in value.items()}
            elif key in _OWN_DICTS:
                attributes[key] = type(value)(value) if isinstance(value, dict) else value
            elif key == "_non_persistent_buffers_set":
                attributes[key] = set(value)
            else:
                attributes[key] = convert(value)
        return made

    return copy_module(model)


_OWN_DICTS = frozenset({"_parameters", "_buffers"})


def _holds_module(item: object, depth: int = 0) -> bool:
    if isinstance(item, nn.Module) or (isinstance(item, types.MethodType) and isinstance(item.__self__, nn.Module)):
        return True
    if depth > 3 or type(item) not in (list, tuple, dict):
        return False
    parts: Iterable[object] = item.values() if isinstance(item, dict) else cast("Iterable[object]", item)
    return any(_holds_module(part, depth + 1) for part in parts)
