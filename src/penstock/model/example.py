"""Example: a call of the model, with its tensors and their batch dimensions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from penstock.errors import UsageError
from penstock.model.structure import Slot, flatten, rebuild


@dataclass(frozen=True)
class BatchLayout:
    """The batch dimensions, as the user gives them."""

    # the batch dimension of all tensors, or one per argument; the default for other arguments is 0
    dims: int | Mapping[str, int] = 0
    whole: Sequence[str] = ()  # arguments that every micro-batch gets whole

    def __post_init__(self) -> None:
        given = self.dims.items() if isinstance(self.dims, Mapping) else [("", self.dims)]
        wrong = [dim for _, dim in given if isinstance(dim, bool) or not isinstance(dim, int) or dim < 0]
        if wrong:
            raise UsageError(f"batch_dim: pass a dimension, 0 or more, or a dict of them; given: {wrong[0]!r:.60}")
        if isinstance(self.whole, str) or not all(isinstance(name, str) for name in self.whole):
            raise UsageError(f"whole: pass a list of argument names; given: {self.whole!r:.60}")

    def dim_of(self, name: str) -> int | None:
        """Return the batch dimension of a tensor; None if it stays whole.

        >>> layout = BatchLayout({"x": 1}, whole=["mask"])
        >>> layout.dim_of("x"), layout.dim_of("x.0"), layout.dim_of("y"), layout.dim_of("mask")
        (1, 1, 0, None)
        """
        argument = name.split(".", maxsplit=1)[0]
        if name in self.whole or argument in self.whole:
            return None
        if isinstance(self.dims, Mapping):
            return self.dims.get(name, self.dims.get(argument, 0))
        return self.dims

    def check(self, arguments: Sequence[str]) -> None:
        """Refuse names that are not arguments of the call."""
        known = {*arguments, *(name.split(".")[0] for name in arguments), "target"}
        faults = [
            f"{option}: {name!r} is not an argument with a tensor in the example ({', '.join(arguments)})"
            for option, names in (("batch_dim", self.dims), ("whole", self.whole))
            for name in (names if not isinstance(names, int) else ())
            if name not in known
        ]
        if faults:
            raise UsageError("; ".join(faults))


@dataclass(frozen=True)
class Call:
    """A call of a model: its tensors, and a template of everything around them."""

    tensors: tuple[torch.Tensor, ...]  # every tensor of the arguments
    names: tuple[str, ...]  # one name per tensor
    template: object = field(repr=False)  # the positional and keyword arguments with slots for the tensors
    constants: Mapping[str, object] = field(repr=False)  # the template of each argument
    batch_dims: tuple[int | None, ...]  # the batch dimension of each tensor; None if it has none
    batch_size: int  # the number of samples
    batch_name: str = ""  # the name of the tensor that gives the batch size

    @property
    def batch_dim(self) -> int:
        """The batch dimension of the tensor that gives the batch size."""
        return self.batch_dims[self.names.index(self.batch_name)] or 0

    def arguments(self, tensors: list[Any] | tuple[Any, ...] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments, with other tensors if given."""
        args, kwargs = rebuild(self.template, self.tensors if tensors is None else tensors)
        return args, kwargs

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """Return the call with `change` applied to each tensor."""
        return replace(self, tensors=tuple(change(tensor) for tensor in self.tensors))

    def resized(self, batch_size: int) -> Call:
        """Return the call with another number of samples, by repeating or dropping samples."""
        if batch_size == self.batch_size:
            return self
        return self.rows([row % self.batch_size for row in range(batch_size)])

    def rows(self, rows: Sequence[int]) -> Call:
        """Return the call with these samples only."""

        def take(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            chosen = torch.tensor(rows, device=tensor.device)
            return tensor.detach().index_select(dim, chosen).requires_grad_(tensor.requires_grad)

        pairs = zip(self.tensors, self.batch_dims, strict=True)
        tensors = tuple(tensor if dim is None else take(tensor, dim) for tensor, dim in pairs)
        return replace(self, tensors=tensors, batch_size=len(rows))


def read_example(example: object, model: nn.Module | None = None, layout: BatchLayout | None = None) -> Call:
    """Read the call of a model from a tensor, a tuple of arguments, a mapping of keyword arguments, or a `Call`.

    >>> call = read_example({"x": torch.zeros(4, 2), "scale": 2.0})
    >>> call.names, call.batch_size
    (('x',), 4)

    Args:
        example: the arguments.
        model: the model, whose forward names the positional arguments.
        layout: the batch dimensions; by default the first dimension of each tensor.

    Raises:
        UsageError: if no tensor has a batch dimension.
    """
    if isinstance(example, Call):
        return example
    layout = layout or BatchLayout()
    if isinstance(example, Mapping) and model is not None:
        _check_keywords(example, model)
    call = read_call(*arguments_of(example), parameter_names(model) if model is not None else (), layout=layout)
    layout.check(call.names)
    return call


def _check_keywords(example: Mapping[Any, Any], model: nn.Module) -> None:
    """Refuse a dict that the model expects as a single argument."""
    plain = getattr(model, "_orig_mod", model)
    if plain._forward_pre_hooks_with_kwargs:  # they may remove arguments
        return
    try:  # a decorator may accept more arguments than the function that it wraps
        parameters = inspect.signature(plain.forward, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = [str(name) for name in example if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise UsageError(
            f"example: a dict holds keyword arguments, but forward has no argument {', '.join(unknown[:4])}; it takes: "
            f"{', '.join(known) or 'none'}. If the model takes the dict itself, pass (batch,) here and in each step"
        )


def parameter_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a model's forward; empty if there is no signature."""
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def read_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: Sequence[str] = (),
    *,
    like: Call | None = None,
    layout: BatchLayout | None = None,
) -> Call:
    """Read the arguments of a call.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        names: the names of the positional parameters.
        like: an earlier call, which gives the batch dimensions.
        layout: the batch dimensions, if there is no earlier call. The first tensor with a batch gives its size.

    Raises:
        UsageError: if no tensor has a batch dimension.
    """
    positional = {names[i] if i < len(names) else f"input_{i}": arg for i, arg in enumerate(args)}
    tensors, template = flatten((args, dict(kwargs)), apart=True)
    tensor_names = tuple(_tensor_names({**positional, **kwargs}))
    named = dict(zip(tensor_names, tensors, strict=True))
    dims = _said_dims(tensor_names, like, layout or BatchLayout())
    first_name = like.batch_name if like is not None and like.batch_name in named else ""
    if not first_name:
        has_batch = ((n, dims[n]) for n, t in named.items() if t.dim() > 0)
        first_name = next((n for n, dim in has_batch if dim is not None and named[n].dim() > dim), "")
    first, dim = named.get(first_name), dims.get(first_name)
    if first is None or dim is None or first.dim() <= dim:
        what = "no tensor" if not tensors else "no tensor with a batch dimension"
        raise UsageError(f"the example holds {what}, so its batch size is unknown{array_hint((args, kwargs))}")
    size = int(first.shape[dim])
    if size == 0:
        raise UsageError(f"the example holds no samples: dimension {dim} of {first_name} is 0")
    return Call(
        tensors=tuple(tensors),
        names=tensor_names,
        template=template,
        constants={name: flatten(item, apart=True)[1] for name, item in {**positional, **kwargs}.items()},
        batch_dims=tuple(
            dim if dim is not None and (like is not None or (t.dim() > dim and t.shape[dim] == size)) else None
            for t, dim in zip(tensors, dims.values(), strict=True)
        ),
        batch_size=size,
        batch_name=first_name,
    )


def _said_dims(names: Sequence[str], like: Call | None, layout: BatchLayout) -> dict[str, int | None]:
    """Return the batch dimension of each tensor, from an earlier call or from a layout."""
    if like is None:
        return {name: layout.dim_of(name) for name in names}
    known = dict(zip(like.names, like.batch_dims, strict=True))
    return {name: known.get(name, 0) for name in names}  # `Chain` refuses unknown names


def arguments_of(example: object, what: str = "example") -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments of an example.

    Raises:
        UsageError: if it is not a tensor, a tuple, a list or a mapping.
    """
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {str(key): value for key, value in example.items()}
    if isinstance(example, tuple) and not hasattr(example, "_fields"):
        return example, {}
    if isinstance(example, list):
        return tuple(example), {}
    given = f"{type(example).__name__}{array_hint(example)}"
    raise UsageError(f"{what}: pass a tensor, a tuple of arguments or a dict of keyword arguments; given: {given}")


def array_hint(thing: object) -> str:
    """Return the advice for a numpy array in a structure; an empty string if there is none."""
    found = next((leaf for leaf in tree_leaves(thing) if isinstance(leaf, np.ndarray)), None)
    if found is None:
        return ""
    return f"; a numpy array ({found.dtype}, shape {found.shape}) is not a tensor: convert it with torch.as_tensor"


def _tensor_names(arguments: Mapping[str, object]) -> Iterator[str]:
    """Yield a name for each tensor, which begins with the name of its argument."""
    for name, item in arguments.items():
        inside, template = flatten(item, apart=True)
        for index in range(len(inside)):
            yield name if isinstance(template, Slot) else f"{name}.{index}"
