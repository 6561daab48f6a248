"""Structures: take the tensors out of the arguments or the result of a model, and put other tensors in their place."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

_DEEPEST = 12  # levels of nesting; deeper parts stay as they are
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, range, slice)


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of the tensor with this index."""

    index: int


@dataclasses.dataclass(frozen=True)
class _Built:
    """A container taken apart: its parts, and the function that builds it from parts."""

    parts: tuple[Any, ...]
    build: Callable[[list[Any]], Any]


def flatten(
    thing: object, *, drop: Callable[[object], bool] | None = None, apart: bool = False
) -> tuple[list[torch.Tensor], object]:
    """Return the tensors in a structure, each once, and a template with slots in their place.

    Lists, tuples, named tuples, mappings, dataclasses (such as the outputs of transformers) and plain objects that
    hold tensors are taken apart. Everything else stays in the template as it is.

    >>> tensors, template = flatten({"a": torch.ones(1), "b": (None, 2)})
    >>> rebuild(template, [t + 1 for t in tensors])
    {'a': tensor([2.]), 'b': (None, 2)}

    Args:
        thing: the structure.
        drop: returns whether to replace an object by None.
        apart: give each occurrence of a tensor its own slot.
    """
    walker = _Walker(drop, apart=apart)
    template = walker.walk(thing, 0)
    return walker.tensors, template


class _Walker:
    """Walks through a structure. A nested recursive function would be a reference cycle and keep the tensors alive."""

    def __init__(self, drop: Callable[[object], bool] | None, *, apart: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self._drop, self._apart = drop, apart
        self._slot_of: dict[int, Slot] = {}
        self._open_now: set[int] = set()

    def walk(self, item: object, depth: int) -> object:
        """Return the template of an item."""
        tensors, slot_of = self.tensors, self._slot_of
        if isinstance(item, torch.Tensor):
            if self._apart or id(item) not in slot_of:
                slot_of[id(item)] = Slot(len(tensors))
                tensors.append(item)
            return slot_of[id(item)]
        if isinstance(item, _PLAIN) or id(item) in self._open_now:
            return item
        if self._drop is not None and self._drop(item):
            return None
        taken = _take_apart(item) if depth < _DEEPEST else None
        if taken is None:
            return item
        parts, build = taken
        self._open_now.add(id(item))
        before = len(slot_of), len(tensors)
        walked = tuple(self.walk(part, depth + 1) for part in parts)
        self._open_now.discard(id(item))
        if all(new is old for new, old in zip(walked, parts, strict=True)) and before == (len(slot_of), len(tensors)):
            return item  # no slots below
        return _Built(walked, build)


def rebuild(template: object, tensors: Sequence[Any]) -> Any:  # noqa: ANN401 - any structure
    """Return the structure of a template, with these tensors (or other objects) in the slots."""
    if isinstance(template, Slot):
        return tensors[template.index]
    if isinstance(template, _Built):
        return template.build([rebuild(part, tensors) for part in template.parts])
    return template


def differing_constants(one: object, other: object, name: str = "") -> Iterator[str]:
    """Yield the places where two templates hold different plain values, or differ in structure."""
    if isinstance(one, _Built) and isinstance(other, _Built) and len(one.parts) == len(other.parts):
        for index, (a, b) in enumerate(zip(one.parts, other.parts, strict=True)):
            yield from differing_constants(a, b, f"{name}[{index}]")
    elif isinstance(one, (_Built, Slot)) or isinstance(other, (_Built, Slot)):
        if type(one) is not type(other):
            yield name
    elif one is not other and not _are_equal(one, other):
        yield name


def _are_equal(one: object, other: object) -> bool:
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # arrays and others whose comparison is not a single bool
        return False


def plain_values(template: object) -> Iterator[object]:
    """Yield the plain values in a template."""
    if isinstance(template, _Built):
        for part in template.parts:
            yield from plain_values(part)
    elif not isinstance(template, Slot):
        yield template


def _take_apart(item: Any) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]] | None:  # noqa: ANN401
    """Return the parts of a container and a function that builds one from parts; None if the item is no container."""
    kind = type(item)
    if isinstance(item, tuple):
        build = _tuple_builder(kind)
        return None if build is None else (tuple(item), build)
    if isinstance(item, list):
        return tuple(item), lambda parts: parts if kind is list else kind(parts)
    if isinstance(item, deque) or kind in (set, frozenset):
        return tuple(item), partial(deque, maxlen=item.maxlen) if isinstance(item, deque) else kind
    if isinstance(item, dict) or (isinstance(item, Mapping) and hasattr(item, "items")):
        keys = list(item)
        return tuple(item[key] for key in keys), lambda parts: _mapping(item, dict(zip(keys, parts, strict=True)))
    if isinstance(item, (torch.nn.Module, type)) or callable(item):
        return None
    return _take_attributes(item)


def _take_attributes(item: Any) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]] | None:  # noqa: ANN401
    """Return the attributes of an object and a function that builds one; None if its attributes are unknown."""
    if hasattr(item, "__dict__"):
        keys = list(vars(item))
        return tuple(vars(item).values()), lambda parts: _object(item, dict(zip(keys, parts, strict=True)))
    return _take_slots(item) if dataclasses.is_dataclass(item) else None


def _take_slots(item: Any) -> tuple[tuple[Any, ...], Callable[[list[Any]], Any]]:  # noqa: ANN401
    """Return the fields of a dataclass with slots, and a function that builds one."""
    names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]

    def build(parts: list[Any]) -> object:
        made = copy.copy(item)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)  # it may be frozen
        return made

    return tuple(getattr(item, name) for name in names), build


def _tuple_builder(kind: Any) -> Callable[[list[Any]], Any] | None:  # noqa: ANN401
    """Return a function that builds a tuple of this type from its parts; None if the type is unknown."""
    if hasattr(kind, "_fields"):
        build: Callable[[list[Any]], Any] = kind._make  # skips checks in __new__: the tensors may be on meta
        return build
    if kind is tuple:
        return tuple
    return kind if kind.__module__ == "torch.return_types" else None


def _mapping(like: Any, items: dict[Any, Any]) -> Any:  # noqa: ANN401
    """Return a mapping of the same type; outputs of transformers are both mappings and dataclasses."""
    kind: Any = type(like)
    if dataclasses.is_dataclass(like):
        return kind(**items)
    if kind is dict:
        return items
    made = copy.copy(like)
    for key, value in items.items():
        made[key] = value
    return made


def _object(like: object, attributes: dict[str, Any]) -> object:
    made = copy.copy(like)
    vars(made).update(attributes)
    return made
