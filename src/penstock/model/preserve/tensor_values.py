"""Tensor values: restore the earlier values of a buffer."""

from __future__ import annotations

import torch


@torch.no_grad()
def restore_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Restore the values of a tensor from a copy; an unchanged tensor is not written to.

    This also restores a size that was changed through `.data`. An expanded tensor cannot be written to, and so cannot
    have changed.
    """
    if not is_same_kind(tensor, values):
        tensor.data = values.clone()
    elif tensor.layout is not torch.strided or tensor.is_nested or not torch.equal(tensor, values):
        tensor.copy_(values)


def is_same_kind(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and device."""
    return (tensor.shape, tensor.dtype, tensor.device) == (values.shape, values.dtype, values.device)
