"""Deferred batch norm: running statistics of the whole batch, although it runs in micro-batches.

Each micro-batch is normalised by its own statistics, as in any plain forward. The running statistics are updated only
once per step, from the mean and the variance of all micro-batches together. A step counts as one batch. So the running
statistics are the same as if the whole batch had run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# The place of a buffer. It identifies the buffer; a tensor does not, because executors replace the buffer's tensor.
Place = tuple[dict[str, torch.Tensor | None], str]
Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class DeferredStatistics(TorchFunctionMode):
    """A mode in which batch norm in training collects its statistics and does not update the running ones.

    Two lanes that share the buffers of a stage have one mode each. A lane enters its mode only while it holds the lock
    of the stage. Both modes are committed together.

    Attributes:
        collecting: whether statistics are collected; False while a forward is recomputed.
        has_any: whether the stage has buffers that batch norm updates.

    >>> norm = nn.BatchNorm1d(2)
    >>> statistics = DeferredStatistics(norm)
    >>> for rows in torch.arange(12.0).view(6, 2).split(2):
    ...     with statistics:
    ...         made = norm(rows)
    >>> norm.running_mean
    tensor([0., 0.])
    >>> statistics.commit()
    >>> norm.running_mean, norm.num_batches_tracked
    (tensor([0.5000, 0.6000]), tensor(1))
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.collecting = True
        self._buffers: dict[str, Place] = {
            f"{path}.{key}": (module._buffers, key)
            for path, module in stage.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        self._counters = [place for place in self._buffers.values() if place[1] == "num_batches_tracked"]
        self.has_any = bool(self._counters) or any(key == "running_mean" for _, key in self._buffers.values())
        self._forget()

    def _forget(self) -> None:
        self._found: dict[int, tuple[str, Place]] = {}
        self._sums: dict[tuple[str, int], _Sum] = {}  # key: name of the running mean, number of the call in a forward
        self._num_calls: dict[str, int] = {}
        self._start: list[torch.Tensor] = []  # the counters before the step
        self._peak: list[torch.Tensor] = []  # the highest value of each counter after any micro-batch

    def __enter__(self) -> DeferredStatistics:
        self._num_calls.clear()
        if not self._start:
            self._start = [counter.clone() for counter in _tensors(self._counters)]
            self._peak = [counter.clone() for counter in self._start]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not self._counters:
            return
        # each micro-batch starts with the counters from before the step, so a cumulative average (1 / count) is right
        counters = list(_tensors(self._counters))
        if self.collecting:
            torch._foreach_maximum_(self._peak, counters)
        torch._foreach_copy_(counters, self._start)

    def __torch_function__(self, func: Function, _: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        """Call a function; if it is batch norm with running statistics, collect its statistics."""
        names = _ARGUMENTS.get(func)
        if names is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        mean, variance = given.get("running_mean"), given.get("running_var")
        is_training = given.get("training", func in _ALWAYS_TRAINING)
        if not is_training or mean is None or variance is None or given["input"].is_meta:
            return func(**given)
        return self._normalise(func, given, mean, variance)

    def _normalise(self, func: Function, given: Kwargs, mean: torch.Tensor, variance: torch.Tensor) -> object:
        """Normalise as usual, but update zeros with a momentum of 1: they become the micro-batch's own statistics."""
        momentum = "momentum" if "momentum" in _ARGUMENTS[func] else "exponential_average_factor"
        own = [torch.zeros_like(mean), torch.zeros_like(variance)]
        result = func(**given | {"running_mean": own[0], "running_var": own[1], momentum: 1.0})
        if func in _FUNCTIONAL:  # it returns new statistics; they are replaced by the unchanged running ones
            own = list(result[-2:])
            result = (*result[:-2], mean, variance)
        if self.collecting:
            values: torch.Tensor = given["input"]
            count = values.numel() // max(1, values.shape[1])
            factor = given.get(momentum, 0.1)
            self._sum_of(mean, variance).add(count, *own, factor=factor)
        return result

    def _sum_of(self, mean: torch.Tensor, variance: torch.Tensor) -> _Sum:
        """Return the sum to add to: a norm that is called twice in a forward updates twice, so it has two sums."""
        name, place = self._find(mean)
        call = self._num_calls[name] = self._num_calls.get(name, -1) + 1
        if (name, call) not in self._sums:
            self._sums[name, call] = _Sum(place, self._find(variance)[1])
        return self._sums[name, call]

    def _find(self, tensor: torch.Tensor) -> tuple[str, Place]:
        """Return the name and the place of a buffer; a tensor that is not a buffer of the stage gets new ones."""
        _, (tensors, key) = self._found.get(id(tensor), ("", ({}, "")))
        if tensors.get(key) is not tensor:
            own: Place = ({"": tensor}, "")
            fitting = ((name, place) for name, place in self._buffers.items() if place[0].get(place[1]) is tensor)
            self._found[id(tensor)] = next(fitting, (f"{id(tensor)}", own))
        return self._found[id(tensor)]

    @torch.no_grad()
    def commit(self, *others: DeferredStatistics) -> None:
        """End the step: update running statistics and counters once, also from other lanes of the same stage."""
        sums: dict[tuple[str, int], list[_Sum]] = {}
        for statistics in (self, *others):
            for key, found in statistics._sums.items():
                sums.setdefault(key, []).append(found)
        for same in sums.values():
            _update(same)
        for statistics in (self, *others):
            if statistics._peak:
                counters = list(_tensors(statistics._counters))
                torch._foreach_maximum_(counters, statistics._peak)
            statistics._forget()

    def message(self) -> list[Any]:
        """Return the collected statistics as names and tensors, which can be sent to another process."""
        found: list[Any] = []
        for (name, call), one in self._sums.items():
            numbers = torch.tensor([one.factor, *one.counts], dtype=torch.float64)
            found += [name, call, numbers, torch.stack(one.means), torch.stack(one.variances)]
        return found

    def add_message(self, message: list[Any]) -> None:
        """Add the statistics that a lane of another process collected for the same stage."""
        for at in range(0, len(message), 5):
            name, call, numbers, means, variances = message[at : at + 5]
            if (name, call) not in self._sums:
                twin = f"{name.removesuffix('mean')}var"
                self._sums[name, call] = _Sum(self._buffers[name], self._buffers[twin])
            factor, *counts = numbers.tolist()
            for count, mean, variance in zip(counts, means, variances, strict=True):
                self._sums[name, call].add(int(count), mean, variance, factor=factor)

    def reset(self) -> None:
        """Discard the statistics of the step; running statistics and counters keep their values from before it."""
        self._forget()


@dataclass
class _Sum:
    """The statistics of all micro-batches for one call of one batch norm."""

    mean: Place
    variance: Place
    factor: float = 0.0
    counts: list[int] = field(default_factory=list)
    means: list[torch.Tensor] = field(default_factory=list)
    variances: list[torch.Tensor] = field(default_factory=list)

    def add(self, count: int, mean: torch.Tensor, variance: torch.Tensor, *, factor: float) -> None:
        """Add a micro-batch: the number of values per channel, their mean and their unbiased variance."""
        self.counts.append(count)
        self.means.append(mean)
        self.variances.append(variance if count > 1 else torch.zeros_like(variance))
        self.factor = factor


def _update(sums: list[_Sum]) -> None:
    """Update running statistics with those of all micro-batches together."""
    counts = [count for one in sums for count in one.counts]
    means = torch.stack([mean for one in sums for mean in one.means]).double()
    variances = torch.stack([variance for one in sums for variance in one.variances]).double()
    total = sum(counts)
    weights = torch.tensor(counts, dtype=torch.float64).to(means.device, non_blocking=True)[:, None]
    mean = (weights * means).sum(0) / total
    # squared deviations: of the values from their micro-batch's mean, and of these means from the mean of all values
    squares = ((weights - 1) * variances + weights * (means - mean).square()).sum(0)
    variance = squares / (total - 1) if total > 1 else torch.full_like(squares, torch.nan)
    for places, new in (([one.mean for one in sums], mean), ([one.variance for one in sums], variance)):
        buffers = list(_tensors(places))
        running = buffers[0].double() * (1 - sums[0].factor) + new * sums[0].factor
        for buffer in buffers:  # lanes share one buffer, or have one each
            buffer.copy_(running)


def _tensors(places: Iterable[Place]) -> Iterator[torch.Tensor]:
    for tensors, key in places:
        tensor = tensors[key]
        if tensor is not None:
            yield tensor


def _arguments() -> dict[Function, tuple[str, ...]]:
    """Return the functions that update running statistics, with the names of their arguments."""
    found: dict[Function, tuple[str, ...]] = {
        functional.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    }
    for name in (
        "batch_norm", "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
        "_batch_norm_with_update", "_batch_norm_with_update_functional", "cudnn_batch_norm", "miopen_batch_norm",
    ):  # fmt: skip
        packet = getattr(torch.ops.aten, name)
        names = tuple(argument.name for argument in packet.default._schema.arguments)
        found |= dict.fromkeys((packet, packet.default, getattr(torch, name, packet)), names)
    return found


_ARGUMENTS = _arguments()
_FUNCTIONAL = {func for func in _ARGUMENTS if "functional" in str(getattr(func, "_qualified_op_name", func))}
_ALWAYS_TRAINING = {func for func, names in _ARGUMENTS.items() if "training" not in names}
