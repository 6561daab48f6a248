"""Tally: the seconds of operations, computed from their arithmetic and memory traffic; attention on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from penstock.model.profiling.device_rates import Rates
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


# ---- attention on meta tensors, with the memory and the operations of a real device's fused kernel


class FusedAttention(TorchFunctionMode):
    """A mode that runs attention on meta tensors as one kernel.

    Without it, torch decomposes this attention into operations, which save tensors that a real device does not save.
    """

    def __torch_function__(
        self, func: Callable[..., object], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in (aten.scaled_dot_product_attention.default, torch.nn.functional.scaled_dot_product_attention):
            fused = _fused(*args, **(kwargs or {}))
            if fused is not None:
                return fused
        return func(*args, **(kwargs or {}))


def _fused(  # noqa: PLR0917 - the order of torch
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001 - fused kernels draw their mask again in the backward
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: ARG001 - the shapes show it
) -> torch.Tensor | None:
    """Return attention by the only fused operation that takes masks and meta tensors; None if it does not apply."""
    if not query.is_meta or query.dim() != 4 or not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    result: torch.Tensor
    result, _ = aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return result


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


ATTENTION_FLOPS: dict[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
