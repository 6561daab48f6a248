"""Meta attention: attention on meta tensors, with the memory and the operations of a real device's fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


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
