"""Tally: the seconds of operations, computed from their arithmetic and their memory traffic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.model.profiling.device_rates import Rates
from penstock.model.profiling.meta_attention import ATTENTION_FLOPS
from penstock.model.profiling.saved_tensors import num_bytes, storage_bytes, storage_of

aten = torch.ops.aten

# of their first argument, these read only the elements that they return
_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather}
_WRITES_NOTHING = ("empty", "new_empty", "_reshape_alias", "detach", "alias", "lift_fresh")


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that adds up the seconds of all operations that run under it."""

    def __init__(self, rates: Rates) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rates = rates
        self.seconds = 0.0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        _: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        given, made = list(_tensors((args, kwargs))), list(_tensors(result))
        if not _is_free(func, given, made):
            packet = func._overloadpacket
            formula = ATTENTION_FLOPS.get(packet) or flop_registry.get(packet)
            flops = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
            is_float32 = any(tensor.dtype in (torch.float32, torch.float64) for tensor in made)
            self.seconds += self.rates.seconds(
                flops=float(flops), num_bytes=_traffic(packet, given, made), is_float32=is_float32
            )
        return result


def _tensors(thing: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(thing) if isinstance(leaf, torch.Tensor))


def _is_free(
    func: torch._ops.OpOverload[..., Any], given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
) -> bool:
    """Return whether an operation only views existing memory, or allocates memory without filling it."""
    if func._schema.is_mutable:
        return False
    if func.is_view or func._schema.name.removeprefix("aten::").startswith(_WRITES_NOTHING) or not made:
        return True
    there = {storage_of(tensor) for tensor in given}
    return all(storage_of(tensor) in there for tensor in made)


def _traffic(packet: object, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    """Return the bytes that an operation reads and writes; an expanded tensor is read once."""
    written = sum(_moved(tensor) for tensor in made)
    if packet in _GATHERS:
        return 2 * written + sum(_moved(tensor) for tensor in given[1:])
    return written + sum(_moved(tensor) for tensor in {id(tensor): tensor for tensor in given}.values())


def _moved(tensor: torch.Tensor) -> int:
    return min(num_bytes(tensor), storage_bytes(tensor))
