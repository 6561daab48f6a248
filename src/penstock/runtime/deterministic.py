"""Deterministic runs: run without random numbers and batch statistics, so that parts of a batch can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.randomness.placed_draws import argument_names

Operation = torch._ops.OpOverload[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_aten = torch.ops.aten
_DROPOUTS = ("dropout_p", "dropout")  # arguments that hold a dropout probability


class Deterministic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random operations return their mean, and batch norm uses its running statistics.

    Attributes:
        is_random: whether an operation ran whose random numbers cannot be replaced; results then cannot be compared.
        left_out: for each mean over classes that ran, the ignored label and the class weights.

    >>> with Deterministic():
    ...     torch.nn.functional.dropout(torch.ones(2), p=0.5).tolist()
    [1.0, 1.0]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_random = False
        self.left_out: list[tuple[int, torch.Tensor | None]] = []

    def __torch_dispatch__(self, func: Operation, _: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Run an operation; replace a random one by its mean."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)  # a higher-order operation; the mode does not see its functions run
        name = func._schema.name.removeprefix("aten::")
        given = dict(zip(argument_names(func), args, strict=False)) | kwargs
        if name in _LIMITED:
            _check_limits(name, given)
        if name in ("nll_loss_forward", "nll_loss2d_forward"):
            self.left_out.append((int(given["ignore_index"]), given["weight"]))
        if name in _MEANS and _is_drawn(name, args, kwargs):
            return _MEANS[name](*args, **kwargs)
        if "batch_norm" in name and "backward" not in name:
            return _batch_norm(given)
        if _drops(func):
            return func(**{key: 0.0 if key in _DROPOUTS else value for key, value in given.items()})
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.is_random = True
        return func(*args, **kwargs)


# on a GPU, a number out of range makes these operations stop the whole process; they raise no exception
_LIMITED = frozenset((
    "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "binary_cross_entropy", "embedding", "gather",
    "scatter", "scatter_", "scatter_add", "scatter_add_", "index_select", "index_add", "index_add_", "index",
    "index_put", "index_put_",
))  # fmt: skip


def _check_limits(name: str, given: Kwargs) -> None:
    """Raise on a GPU as torch does on a CPU: comparisons try labels and outputs that a loss need not accept."""
    first = next(value for value in given.values() if isinstance(value, torch.Tensor))
    if _is_on_gpu(first) and not all(_limits_hold(name, given)):
        raise IndexError(f"{name}: numbers are out of range")


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _limits_hold(name: str, given: Kwargs) -> Iterator[bool]:
    """Yield whether the arguments of an operation are in range; the host waits for the device."""
    if name == "binary_cross_entropy":
        value = given["self"]
        yield bool(((value >= 0) & (value <= 1)).all())
    elif name == "embedding":
        yield _is_within(given["indices"], 0, given["weight"].shape[0])
    elif "index" not in given and "indices" not in given:  # labels
        labels = given["target"]
        classes = given["self"].shape[1 if given["self"].dim() > 1 else 0]
        yield _is_within(labels[labels != given.get("ignore_index")], 0, classes)
    elif "index" in given:
        yield _is_within(given["index"], 0, given["self"].shape[given["dim"]])
    elif not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in given["indices"]):
        for size, index in zip(given["self"].shape, given["indices"], strict=False):
            if index is not None:
                yield _is_within(index, -size, size)


def _is_within(index: torch.Tensor, low: int, high: int) -> bool:
    return bool(((index >= low) & (index < high)).all())


def _is_drawn(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Return whether to replace an operation by its mean; one that draws from the user's generator is kept."""
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


def _batch_norm(given: Kwargs) -> object:
    """Normalise by the running statistics; without them, by mean 0 and variance 1."""
    value = given["input"]
    channels = value.shape[1]
    mean, variance = given.get("running_mean"), given.get("running_var")
    if mean is None or variance is None:
        mean, variance = value.new_zeros(channels), value.new_ones(channels)
    return _aten.native_batch_norm.default(
        value, given.get("weight"), given.get("bias"), mean, variance, False, 0.0, given.get("eps", 1e-5)
    )


@cache
def _drops(func: Operation) -> bool:
    return "backward" not in func._schema.name and any(name in _DROPOUTS for name in argument_names(func))
