"""Averaged weights: a running average of a pipeline's parameters, as `torch.optim.swa_utils` computes it (EMA, SWA)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from penstock.errors import UsageError
from penstock.pipeline.pipeline import Pipeline


class AveragedWeights:
    """A running average of the trainable parameters of the lanes in this process.

    The averages are those of `torch.optim.swa_utils.AveragedModel` with the plain model: the first update copies the
    weights; without a function, all updates count the same (SWA). Under torchrun, each process averages its own lane.

    >>> from torch.optim.swa_utils import get_ema_multi_avg_fn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> batch, target = torch.ones(6, 4), torch.zeros(6, 1)
    >>> with Pipeline(model, example=batch, loss=nn.MSELoss(), lanes=2, micro_batches=3, cuts=[2]) as pipe:
    ...     average = AveragedWeights(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    ...     average.update()  # after each optimizer.step()
    ...     with average.applied():
    ...         loss = pipe.evaluate(batch, target)
    >>> average.num_updates
    1

    Args:
        pipe: the pipeline.
        device: the device of the averages; by default, that of each parameter. "cpu" saves memory of the lanes.
        avg_fn: computes a new average from an average, a parameter and the number of updates.
        multi_avg_fn: the same for lists of tensors, in place, such as `get_ema_multi_avg_fn(0.999)`.
        use_buffers: whether to average floating-point buffers too, such as the statistics of batch norm.

    Raises:
        UsageError: if both functions are given.
    """

    def __init__(
        self,
        pipe: Pipeline,
        *,
        device: torch.device | str | None = None,
        avg_fn: Callable[..., torch.Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise UsageError("avg_fn, multi_avg_fn: give only one of them")
        self._named = dict(_averaged(pipe, use_buffers=use_buffers))
        where = None if device is None else torch.device(device)
        self._model = AveragedModel(
            _Held([t for tensors in self._named.values() for t in tensors]), where, avg_fn, multi_avg_fn,
            use_buffers=True,
        )  # fmt: skip

    @property
    def num_updates(self) -> int:
        """The number of updates so far."""
        return int(self._model.n_averaged)

    def update(self) -> None:
        """Add the current weights to the average; call it after `optimizer.step()`."""
        if self._named:
            self._model.update_parameters(_Held(self._live))
        else:  # a lane without trainable parameters, for which torch's function fails
            self._model.n_averaged += 1

    @property
    def _live(self) -> list[torch.Tensor]:
        return [tensor for tensors in self._named.values() for tensor in tensors]

    @property
    def _averages(self) -> list[torch.Tensor]:
        return list(self._model.module.buffers())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Run a block with the averages in place of the weights, for example to evaluate or to export.

        Raises:
            UsageError: if there was no update yet.
        """
        if not self.num_updates:
            raise UsageError("applied: there is no average yet; call update() after the optimizer's step")
        live = self._live
        with torch.no_grad():
            before = [tensor.detach().clone() for tensor in live]
            _copy(self._averages, live)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(before, live)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages under the model's own names, and the number of updates."""
        names = [name for name, tensors in self._named.items() for _ in tensors]  # copies on several devices are equal
        return {"averages": dict(zip(names, self._averages, strict=True)), "num_updates": self.num_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; names of other lanes are ignored.

        Raises:
            UsageError: if a name is missing.
        """
        if missing := self._named.keys() - state["averages"].keys():
            raise UsageError(f"state: has no average of {', '.join(sorted(missing)[:5])}")
        given = [state["averages"][name] for name, tensors in self._named.items() for _ in tensors]
        with torch.no_grad():
            _copy(given, self._averages)
            self._model.n_averaged.fill_(state["num_updates"])


def _averaged(pipe: Pipeline, *, use_buffers: bool) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield each tensor to average with its name; lanes on several devices may have several copies."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in pipe.internals.held():
        is_parameter = isinstance(tensor, nn.Parameter)
        if (is_parameter and tensor.requires_grad) or (not is_parameter and use_buffers and tensor.is_floating_point()):
            found.setdefault(name, {})[id(tensor)] = tensor
    yield from ((name, list(copies.values())) for name, copies in found.items())


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class _Held(nn.Module):
    """Tensors as the buffers of a module, which is what an AveragedModel copies."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"tensor_{number}", tensor.detach())
