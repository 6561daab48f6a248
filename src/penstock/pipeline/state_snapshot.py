"""Before: what a step changes besides gradients, as it was, to be put back after a run that is not to count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from penstock.model.preserve.modes import RandomStates
from penstock.model.preserve.tensor_values import is_same_kind, restore_values

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

__all__ = ["StateSnapshot", "loss_module", "preserved_state"]


class _Holder(Protocol):
    """Who holds buffers, under names."""

    def __iter__(self) -> Iterator[str]: ...

    def get(self, name: str) -> torch.Tensor: ...

    def set(self, name: str, tensor: torch.Tensor) -> None: ...


class StateSnapshot:
    """The buffers of all stages here and of the loss, and the states of all random generators.

    All buffers are copied at each `keep`, whether they have changed or not: torch counts changes of a tensor, but not
    those by batch norm, by a CUDA graph, or through `.data`.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline) -> None:
        held: dict[int, _Holder] = {id(stage.held): stage.held for chain in pipe._chains for stage in chain.stages}
        loss = loss_module(pipe._steps.loss)
        if loss is not None:
            held[id(loss)] = _OfModule(loss)
        self._held = list(held.values())
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer, and its values
        self._draws = RandomStates()

    @torch.no_grad()
    def take(self) -> None:
        """Copy all as it is now."""
        kept, again = {}, []
        for number, holder in enumerate(self._held):
            for name in holder:
                tensor = holder.get(name)
                if isinstance(tensor, nn.Parameter) or tensor.is_meta:
                    continue
                before = self._kept.get((number, name))
                if before is not None and _is_plain(tensor) and is_same_kind(tensor, before[1]):
                    kept[number, name] = (tensor, before[1])
                    again.append((before[1], tensor))
                else:
                    kept[number, name] = (tensor, tensor.detach().clone())
        _copy(again)
        self._kept = kept
        self._draws = RandomStates()

    @torch.no_grad()
    def restore(self) -> None:
        """Make all what it was at the last `keep`."""
        for (number, name), (tensor, values) in self._kept.items():
            holder = self._held[number]
            if not _is_plain(tensor):  # nested, sparse and such: what they can do differs
                holder.set(name, values)
                continue
            if holder.get(name) is not tensor:
                holder.set(name, tensor)
            restore_values(tensor, values)
        self._draws.restore()


def loss_module(loss: object) -> nn.Module | None:
    """Return the user's loss, behind the compiler where it is compiled; None where it is no module."""
    own = getattr(loss, "_orig_mod", loss)
    return own if isinstance(own, nn.Module) else None


@contextmanager
def preserved_state(pipe: Pipeline) -> Iterator[None]:
    """Run something inside; gradients, buffers and random states are afterwards as they were."""
    gradients = [(parameter, parameter.grad) for parameter in pipe._steps.graphs.parameters()]
    before = StateSnapshot(pipe)
    before.take()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        before.restore()


class _OfModule:
    """The buffers of a module, as stages hold theirs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._module.named_buffers()])

    def get(self, name: str) -> torch.Tensor:
        return self._module.get_buffer(name)

    def set(self, name: str, tensor: torch.Tensor) -> None:
        path, _, last = name.rpartition(".")
        self._module.get_submodule(path)._buffers[last] = tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    is_known = type(tensor) in (torch.Tensor, nn.Buffer)
    return is_known and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first; many small ones of a GPU in one launch."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        alike.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for some in alike.values():
        torch._foreach_copy_([to for to, _ in some], [values for _, values in some])
