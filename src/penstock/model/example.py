"""Example: how a model is called, with which tensors, and which of their dimensions is the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.model.structure import Slot, flatten, rebuild

__all__ = ["Call", "read_call", "read_example"]


@dataclass(frozen=True)
class Call:
    """A call of a model: its tensors, and a template of everything around them.

    Attributes:
        tensors: every tensor in it, once.
        names: a name for each.
        template: the positional and keyword arguments with slots for the tensors.
        is_batched: which tensors have the batch as their first dimension.
        batch_size: how many samples.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    template: object = field(repr=False)
    is_batched: tuple[bool, ...]
    batch_size: int

    def arguments(self, tensors: list[Any] | tuple[Any, ...] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, with other tensors if given."""
        args, kwargs = rebuild(self.template, self.tensors if tensors is None else tensors)
        return args, kwargs

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the call with each tensor changed."""
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))

    def resized(self, batch_size: int) -> Call:
        """Return the call for another number of samples, made by repeating those there are."""
        if batch_size == self.batch_size:
            return self

        def take(tensor: torch.Tensor) -> torch.Tensor:
            rows = torch.arange(batch_size, device=tensor.device) % self.batch_size
            return tensor.detach().index_select(0, rows).requires_grad_(tensor.requires_grad)

        tensors = tuple(take(t) if own else t for t, own in zip(self.tensors, self.is_batched, strict=True))
        return replace(self, tensors=tensors, batch_size=batch_size)


def read_example(example: object) -> Call:
    """Read how a model is called: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.

    >>> call = read_example({"x": torch.zeros(4, 2), "scale": 2.0})
    >>> call.names, call.batch_size
    (('x',), 4)

    Raises:
        UsageError: when there is no tensor in it, or none with a first dimension.
    """
    if isinstance(example, Call):
        return example
    return read_call(*_arguments(example))


def read_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Read the arguments of a call.

    Raises:
        UsageError: when there is no tensor in them, or none with a first dimension.
    """
    tensors, template = flatten((args, kwargs))
    if not tensors:
        raise UsageError("the example holds no tensor to take the batch size from")
    first = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if first is None:
        raise UsageError("the example holds no tensor with a first dimension to take the batch size from")
    size = int(first.shape[0])
    if size == 0:
        raise UsageError("the example holds no samples: the first dimension of its first tensor is 0")
    return Call(
        tensors=tuple(tensors),
        names=_names(args, kwargs, tensors),
        template=template,
        is_batched=tuple(tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors),
        batch_size=size,
    )


def _arguments(example: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return example, {}
    if isinstance(example, list):
        return tuple(example), {}
    raise UsageError(f"example: give a tensor, a tuple of arguments or a dict of keyword arguments, not {example!r:.80}")


def _names(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> tuple[str, ...]:
    """Name each tensor after the argument that it came in."""
    name_of: dict[int, str] = {}
    for key, item in [*((f"input_{i}", arg) for i, arg in enumerate(args)), *kwargs.items()]:
        inside, template = flatten(item)
        for index, tensor in enumerate(inside):
            name_of.setdefault(id(tensor), key if isinstance(template, Slot) else f"{key}_{index}")
    taken: dict[str, int] = {}
    for tensor in tensors:
        name = name_of[id(tensor)]
        taken[name] = taken.get(name, 0) + 1
        if taken[name] > 1:
            name_of[id(tensor)] = f"{name}_{taken[name]}"
    return tuple(name_of[id(tensor)] for tensor in tensors)
