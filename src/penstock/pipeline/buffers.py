"""Buffers: copies of what stages hold besides parameters, to be put back after a run that is not to count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.model.stages import Chain

__all__ = ["Buffers"]

_SMALL = 1 << 14  # numbers: more than the channels of any layer


@dataclass
class _Kept:
    """A buffer, a copy of its values, and its version then."""

    tensor: torch.Tensor
    values: torch.Tensor
    version: int


class Buffers:
    """The buffers of all stages here.

    Of large ones only what has changed since the last `keep` is copied again, so that keeping costs next to nothing
    where a model's buffers are masks and tables.

    Args:
        chains: the stages.
    """

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._held = {id(stage.held): stage.held for chain in chains for stage in chain.stages}
        self._kept: dict[tuple[int, str], _Kept] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy them as they are now."""
        again = []
        for key, tensor in self._all():
            kept = self._kept.get(key)
            if kept is None or kept.tensor is not tensor:
                self._kept[key] = _Kept(tensor, tensor.detach().clone(), _version(tensor))
            elif _may_differ(kept):
                again.append(kept)
        _copy([(kept.values, kept.tensor) for kept in again])
        for kept in again:
            kept.version = _version(kept.tensor)

    @torch.no_grad()
    def put_back(self) -> None:
        """Make them what they were at the last `keep`."""
        for (number, name), kept in self._kept.items():
            held = self._held[number]
            if held.get(name) is not kept.tensor:
                held.set(name, kept.tensor)
        changed = [kept for kept in self._kept.values() if _may_differ(kept)]
        _copy([(kept.tensor, kept.values) for kept in changed])
        for kept in changed:
            kept.version = _version(kept.tensor)

    def _all(self) -> Iterator[tuple[tuple[int, str], Any]]:
        for number, held in self._held.items():
            for name in held:
                tensor = held.get(name)
                if not isinstance(tensor, nn.Parameter) and not tensor.is_meta:
                    yield (number, name), tensor


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair to the first; many small ones of a GPU in one launch."""
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in pairs:
        alike.setdefault((pair[0].device, pair[0].dtype), []).append(pair)
    for some in alike.values():
        torch._foreach_copy_([to for to, _ in some], [values for _, values in some])


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _may_differ(kept: _Kept) -> bool:
    # batch norm changes its statistics without counting, and so does a CUDA graph with whatever it changes
    is_counted = not kept.tensor.is_cuda and kept.version >= 0 and kept.tensor.numel() > _SMALL
    return not is_counted or kept.version != _version(kept.tensor)
