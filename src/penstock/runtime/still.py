"""Still: run a model without chance and without batch norm's coupling, so that parts of a batch can be compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Still"]

Operation = torch._ops.OpOverload[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_aten = torch.ops.aten
_DROPOUTS = ("dropout_p", "dropout")  # arguments that say how much an operation drops


class Still(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, random operations return their mean, and batch norm uses its running statistics.

    Attributes:
        is_random: an operation ran whose random numbers it cannot replace; results cannot be compared.
        left_out: for each mean over classes that ran, the label that it ignores and the weights of the classes.

    >>> with Still():
    ...     torch.nn.functional.dropout(torch.ones(2), p=0.5).tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False
        self.left_out: list[tuple[int, torch.Tensor | None]] = []

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        """Do an operation; a random one by its mean."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operation runs its functions out of sight
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            given = dict(zip(_names(func), args, strict=False)) | kwargs
            self.left_out.append((int(given["ignore_index"]), given["weight"]))
        if name in _MEANS and _is_drawn(name, args, kwargs):
            return _MEANS[name](*args, **kwargs)
        if "batch_norm" in name and "backward" not in name:
            return _batch_norm(func, args, kwargs)
        if _drops(func):
            given = dict(zip(_names(func), args, strict=False)) | kwargs
            return func(**{key: 0.0 if key in _DROPOUTS else value for key, value in given.items()})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        return func(*args, **kwargs)


def _is_drawn(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a mean may take the operation's place: the user's own generator keeps its numbers."""
    return kwargs.get("generator") is None and not (name == "native_dropout" and args[2] is False)


def _fill(tensor: torch.Tensor, mean: torch.Tensor | float = 0.5, *_: object, **__: object) -> torch.Tensor:
    return tensor.copy_(mean) if isinstance(mean, torch.Tensor) else tensor.fill_(mean)


def _uniform(tensor: torch.Tensor, low: float = 0.0, high: float = 1.0, **_: object) -> torch.Tensor:
    return tensor.fill_((low + high) / 2)


def _normal(tensor: torch.Tensor, mean: float = 0.0, *_: object, **__: object) -> torch.Tensor:
    return tensor.fill_(mean)


def _bernoulli(tensor: torch.Tensor, p: float | None = None, **_: object) -> torch.Tensor:
    return tensor.clone() if p is None else torch.full_like(tensor, p)


def _dropped(tensor: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)


def _made(mean: float) -> Callable[..., torch.Tensor]:
    def make(size: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - as torch.rand
        kwargs.pop("generator", None)
        made: torch.Tensor = _aten.full.default(size, mean, **{"dtype": torch.get_default_dtype()} | kwargs)
        return made

    return make


def _made_like(mean: float) -> Callable[..., torch.Tensor]:
    return lambda tensor, **kwargs: torch.full_like(tensor, mean, **kwargs)


_MEANS: dict[str, Callable[..., Any]] = {
    "native_dropout": _dropped,
    "bernoulli_": _fill,
    "bernoulli": _bernoulli,
    "uniform_": _uniform,
    "normal_": _normal,
    "rand": _made(0.5),
    "randn": _made(0.0),
    "rand_like": _made_like(0.5),
    "randn_like": _made_like(0.0),
}


def _batch_norm(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """Normalise by the running statistics, or by those of a normal distribution where there are none."""
    given = dict(zip(_names(func), args, strict=False)) | kwargs
    value = given["input"]
    channels = value.shape[1]
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        mean, variance = value.new_zeros(channels), value.new_ones(channels)
    return _aten.native_batch_norm.default(
        value, given.get("weight"), given.get("bias"), mean, variance, False, 0.0, given.get("eps", 1e-5)
    )


@cache
def _names(func: Operation) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@cache
def _drops(func: Operation) -> bool:
    return "backward" not in func._schema.name and any(name in _DROPOUTS for name in _names(func))
