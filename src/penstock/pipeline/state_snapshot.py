"""State snapshot: a copy of buffers and random states, restored after a run that must leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from penstock.model.preserve import RandomStates, is_same_kind, restore_values

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline


class _Holder(Protocol):
    """An object that holds buffers by name."""

    def __iter__(self) -> Iterator[str]: ...

    def get(self, name: str) -> torch.Tensor: ...

    def set(self, name: str, tensor: torch.Tensor) -> None: ...


class StateSnapshot:
    """The buffers of the loss and of all stages in this process, and the states of all random generators.

    Each `take` copies all buffers, changed or not. Torch's version counter cannot show which of them have changed: it
    misses changes by batch norm, by a CUDA graph, or through `.data`.
    """

    def __init__(self, pipe: Pipeline) -> None:
        held: dict[int, _Holder] = {id(stage.held): stage.held for chain in pipe._chains for stage in chain.stages}
        loss = loss_module(pipe._steps.loss)
        if loss is not None:
            held[id(loss)] = _ModuleBuffers(loss)
        self._held = list(held.values())
        self._kept: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}  # a buffer and the copy of its values
        self._draws = RandomStates()

    @torch.no_grad()
    def take(self) -> None:
        """Take a snapshot, which replaces the last one."""
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
        """Restore the last snapshot."""
        for (number, name), (tensor, values) in self._kept.items():
            holder = self._held[number]
            if not _is_plain(tensor):  # nested, sparse or quantized: not all of them can be copied in place
                holder.set(name, values)
                continue
            if holder.get(name) is not tensor:
                holder.set(name, tensor)
            restore_values(tensor, values)
        self._draws.restore()


def loss_module(loss: object) -> nn.Module | None:
    """Return the module of the user's loss, unwrapped if it is compiled; None if the loss is not a module."""
    own = getattr(loss, "_orig_mod", loss)
    return own if isinstance(own, nn.Module) else None


@contextmanager
def preserved_state(pipe: Pipeline) -> Iterator[None]:
    """Clear all gradients; after the block, restore gradients, buffers and random states."""
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


class _ModuleBuffers:
    """The buffers of a module, with the interface of a stage's tensors."""

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
    """Copy the second tensor of each pair to the first; many small tensors on a GPU are copied in one launch."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        alike.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for some in alike.values():
        torch._foreach_copy_([to for to, _ in some], [values for _, values in some])
