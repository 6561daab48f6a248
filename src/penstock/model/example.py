"""Example: how a model is called, with which tensors, and which of their dimensions is the batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.model.structure import Slot, flatten, rebuild

__all__ = ["Call", "arguments_of", "parameter_names", "read_call", "read_example"]


@dataclass(frozen=True)
class Call:
    """A call of a model: its tensors, and a template of everything around them.

    Attributes:
        tensors: every tensor in it, once.
        names: a name for each.
        template: the positional and keyword arguments with slots for the tensors.
        constants: for each argument the template of it.
        is_batched: which tensors have the batch as their first dimension.
        batch_size: how many samples.
        batch_name: the name of the tensor whose first dimension says so.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    template: object = field(repr=False)
    constants: Mapping[str, object] = field(repr=False)
    is_batched: tuple[bool, ...]
    batch_size: int
    batch_name: str = ""

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


def read_example(example: object, model: nn.Module | None = None) -> Call:
    """Read how a model is called: a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.

    >>> call = read_example({"x": torch.zeros(4, 2), "scale": 2.0})
    >>> call.names, call.batch_size
    (('x',), 4)

    Args:
        example: the arguments.
        model: whose forward gives the positional ones their names.

    Raises:
        UsageError: when there is no tensor in it, or none with a first dimension.
    """
    if isinstance(example, Call):
        return example
    return read_call(*arguments_of(example), parameter_names(model) if model is not None else ())


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a model's forward, as far as they can be known."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def read_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str] = (), batch_name: str = ""
) -> Call:
    """Read the arguments of a call; `names` are those of the positional parameters.

    The batch size is that of the tensor called `batch_name`, or else of the first one.

    Raises:
        UsageError: when there is no tensor in them, or none with a first dimension.
    """
    positional = {names[i] if i < len(names) else f"input_{i}": arg for i, arg in enumerate(args)}
    tensors, template = flatten((args, dict(kwargs)), apart=True)
    tensor_names = tuple(_tensor_names({**positional, **kwargs}))
    named = dict(zip(tensor_names, tensors, strict=True))
    first_name = batch_name if batch_name in named else next((n for n, t in named.items() if t.dim() > 0), "")
    first = named.get(first_name)
    if first is None or first.dim() == 0:
        what = "no tensor" if not tensors else "no tensor with a first dimension"
        raise UsageError(f"the example holds {what} to take the batch size from")
    size = int(first.shape[0])
    if size == 0:
        raise UsageError("the example holds no samples: the first dimension of its first tensor is 0")
    return Call(
        tensors=tuple(tensors),
        names=tensor_names,
        template=template,
        constants={name: flatten(item, apart=True)[1] for name, item in {**positional, **kwargs}.items()},
        is_batched=tuple(tensor.dim() > 0 and tensor.shape[0] == size for tensor in tensors),
        batch_size=size,
        batch_name=first_name,
    )


def arguments_of(example: object, what: str = "example") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that a tensor, a tuple or a mapping stands for.

    Raises:
        UsageError: when it is none of these.
    """
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return example, {}
    if isinstance(example, list):
        return tuple(example), {}
    raise UsageError(f"{what}: give a tensor, a tuple of arguments or a dict of keyword arguments, not {example!r:.80}")


def _tensor_names(arguments: Mapping[str, object]) -> Iterator[str]:
    """Name each tensor after the argument that it came in."""
    for name, item in arguments.items():
        inside, template = flatten(item, apart=True)
        for index in range(len(inside)):
            yield name if isinstance(template, Slot) else f"{name}.{index}"
