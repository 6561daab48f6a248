"""Module shell: a copy of a model's modules that shares the tensors, so that a stage can change its own modules."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from penstock.model.preserve import CONTAINERS, TORCH_ATTRIBUTES

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def make_shell(model: nn.Module, filled: Collection[str] = ()) -> nn.Module:
    """Copy a model's modules, and only these: tensors and nearly all other attributes are shared.

    Lists and dicts that hold modules, and methods bound to modules, are rebuilt with the copies. A configuration with
    caches on is copied with caches off, because stages do not use caches.

    Args:
        model: the user's model.
        filled: the lists, dicts and sets in attributes, as "path:name", that the forward fills with tensors. The shell
            gets copies of them, because stages run at the same time with different micro-batches. Hooks may fill them.
            So hooks that refer to modules of the model, by a method, a partial or a closure, then refer to the copies.
    """
    copier = _Copier({id(module) for module in model.modules()}, has_hooks=bool(filled))
    for name in filled:
        path, _, attribute = name.rpartition(":")
        container = getattr(model.get_submodule(path), attribute)
        copier.remember(container, container.copy())
    made: nn.Module = copier.convert(model)
    return made


def hooks_in(model: nn.Module) -> str:
    """Return a text that names a module with hooks of the user, which a trace would drop; empty if there is none."""
    for name, module in model.named_modules():
        for kind in HOOKS:
            if any(not is_of_library(hook, module) for hook in (getattr(module, kind, None) or {}).values()):
                return f"hooks on {name or 'the model'}, which only the model's own forward calls"
    return ""


def is_of_library(hook: object, module: nn.Module) -> bool:
    """Return whether the library that defines a module has set a hook; such a hook is part of the model."""
    package = type(module).__module__.partition(".")[0]
    is_installed = "-packages" in (getattr(sys.modules.get(package), "__file__", None) or "")
    return is_installed and str(getattr(hook, "__module__", "")).partition(".")[0] == package


class _Copier:
    def __init__(self, own: Collection[int], *, has_hooks: bool) -> None:
        self._own, self._has_hooks = own, has_hooks  # ids of the model's modules; whether to convert hooks
        self._copies: dict[int, Any] = {}
        self._keep: list[object] = []  # keeps objects alive, so that ids stay unique while we copy

    def remember(self, item: Any, made: Any) -> Any:  # noqa: ANN401
        """Use `made` for an item from now on; return it."""
        self._keep.append(item)
        self._copies[id(item)] = made
        return made

    def convert(self, item: Any) -> Any:  # noqa: ANN401, PLR0911 - a table of kinds
        """Return the shell's version of an item; for most items, the item itself."""
        if id(item) in self._copies:
            return self._copies[id(item)]
        if isinstance(item, nn.Module):
            return self._module(item)
        if isinstance(item, types.MethodType) and isinstance(item.__self__, nn.Module):
            return types.MethodType(item.__func__, self.convert(item.__self__))
        if isinstance(item, functools.partial):
            return self._partial(item)
        if isinstance(item, types.FunctionType):
            return self._function(item)
        if type(item) in (list, tuple, dict) and _holds_module(item):
            if isinstance(item, dict):
                return {key: self.convert(value) for key, value in item.items()}
            return type(item)(self.convert(value) for value in item)
        if getattr(item, "use_cache", None) is True and not callable(item):
            made = self.remember(item, copy.copy(item))
            made.use_cache = False
            return made
        return item

    def _module(self, module: nn.Module) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module  # cannot be copied as a Python object
        made: nn.Module = self.remember(module, module.__class__.__new__(module.__class__))
        attributes = vars(made)
        for key, value in vars(module).items():
            if key == "_modules":
                attributes[key] = {
                    name: None if child is None else self.convert(child) for name, child in value.items()
                }
            elif key in _OWN_DICTS:
                attributes[key] = type(value)(value) if isinstance(value, dict) else value
            elif key in _HOOKS:
                attributes[key] = self._hooks(value)
            elif key == "_non_persistent_buffers_set":
                attributes[key] = set(value)
            else:
                attributes[key] = self.convert(value)
        of_model = {
            kind: frozenset(
                number for number, hook in vars(module)[kind].items() if attributes[kind][number] is not hook
            )
            for kind in _HOOKS
        }
        if any(of_model.values()):
            attributes[_MODEL_HOOKS] = of_model
        return made

    def _hooks(self, hooks: dict[int, Any]) -> dict[int, Any]:
        made = {number: self.convert(hook) for number, hook in hooks.items()} if self._has_hooks else hooks
        if all(made[number] is hook for number, hook in hooks.items()):
            return hooks  # shared: a hook that is removed later disappears here, too
        return type(hooks)(made)

    def _partial(self, item: functools.partial[Any]) -> functools.partial[Any]:
        parts = [item.func, *item.args, *item.keywords.values()]
        made = [self.convert(part) for part in parts]
        if all(one is other for one, other in zip(parts, made, strict=True)):
            return item
        count = 1 + len(item.args)
        return functools.partial(made[0], *made[1:count], **dict(zip(item.keywords, made[count:], strict=True)))

    def _function(self, item: types.FunctionType) -> types.FunctionType:
        """Return a function whose closure refers to the copies of modules; the function itself if nothing changes."""
        cells = item.__closure__ or ()
        known = [_content_of(cell) for cell in cells]
        made = [
            self.convert(thing) if id(thing) in self._own or id(thing) in self._copies else thing for thing in known
        ]
        if all(one is other for one, other in zip(known, made, strict=True)):
            return item
        closure = tuple(
            cell if one is other else types.CellType(other) for cell, one, other in zip(cells, known, made, strict=True)
        )
        function = types.FunctionType(item.__code__, item.__globals__, item.__name__, item.__defaults__, closure)
        function.__kwdefaults__ = item.__kwdefaults__
        return function


_MODEL_HOOKS = "_penstock_model_hooks"  # in a module of a shell: the ids of the hooks that are part of the model
_OWN_DICTS = frozenset({"_parameters", "_buffers"})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
_NOTHING = object()


def _content_of(cell: types.CellType) -> object:
    """Return the content of a closure cell; `_NOTHING` if it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def model_hooks(module: nn.Module, kind: str) -> frozenset[int]:
    """Return the ids of a module's hooks that are part of the model; `kind` is the name of torch's dict of hooks."""
    found: frozenset[int] = vars(module).get(_MODEL_HOOKS, {}).get(kind, frozenset())
    return found


@contextmanager
def without_model_hooks(module: nn.Module) -> Iterator[None]:
    """Temporarily remove the hooks that are part of the model from a shell's module."""
    before = {kind: vars(module)[kind] for kind in _HOOKS if model_hooks(module, kind)}
    for kind, hooks in before.items():
        of_model = model_hooks(module, kind)
        vars(module)[kind] = type(hooks)((number, hook) for number, hook in hooks.items() if number not in of_model)
    try:
        yield
    finally:
        vars(module).update(before)


def containers_of(model: nn.Module) -> dict[str, Any]:
    """Return the lists, dicts and sets in the attributes of a model's modules, as "path:name"."""
    return {
        f"{path}:{name}": value
        for path, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, value in vars(module).items()
        if name not in TORCH_ATTRIBUTES and type(value) in CONTAINERS
    }


def _holds_module(item: object, depth: int = 0) -> bool:
    if isinstance(item, nn.Module) or (isinstance(item, types.MethodType) and isinstance(item.__self__, nn.Module)):
        return True
    if depth > 3 or type(item) not in (list, tuple, dict):
        return False
    parts: Iterable[object] = item.values() if isinstance(item, dict) else cast("Iterable[object]", item)
    return any(_holds_module(part, depth + 1) for part in parts)
