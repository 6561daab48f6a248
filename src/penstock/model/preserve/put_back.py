"""Put back: give a buffer the values that it had, whatever was done to it meanwhile."""

from __future__ import annotations

import torch

__all__ = ["is_alike", "put_back"]


@torch.no_grad()
def put_back(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Make a tensor what a copy of it says; one that is as it was is left alone.

    A size that was changed (through `.data`) is changed back. One that repeats the same memory cannot be written to,
    and has not been.
    """
    if not is_alike(tensor, values):
        tensor.data = values.clone()
    elif tensor.layout is not torch.strided or tensor.is_nested or not torch.equal(tensor, values):
        tensor.copy_(values)


def is_alike(tensor: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether one can be copied to the other as it lies."""
    return (tensor.shape, tensor.dtype, tensor.device) == (values.shape, values.dtype, values.device)
