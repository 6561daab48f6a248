"""Fill: copy host tensors to other host memory on the thread that asks, where that is quick enough.

torch shares a copy of more than a few thousand numbers among its threads. For some megabytes that wins tens of
microseconds. It costs a wait for the slowest of them: one whose core is at work for others, as for loader processes,
gets its turn milliseconds later (benchmarks/filling).
"""

from __future__ import annotations

from ctypes import memmove

import torch

__all__ = ["fill", "is_plain"]

_SHARED_NUMBERS = 32_768  # torch gives each of its threads so many at least
_MOST_BYTES = 4 << 20  # one thread copies them in half a millisecond
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # all others do things in their own way


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is no more than numbers in memory."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_quantized


def fill(room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return host memory of its own, dense and of the tensor's shape, with the tensor's values in it.

    >>> fill(torch.empty(3), torch.arange(3.0))
    tensor([0., 1., 2.])
    """
    if room.numel() <= _SHARED_NUMBERS or room.nbytes > _MOST_BYTES or not _lies_like(tensor, room):
        return room.copy_(tensor.detach())
    place = tensor.data_ptr()
    if not place:  # torch has tensors that are known to be zero, or are to be made later
        return room.copy_(tensor.detach())
    memmove(room.data_ptr(), place, room.nbytes)  # gives Python's lock back meanwhile
    return room


def _lies_like(tensor: torch.Tensor, room: torch.Tensor) -> bool:
    """Return whether a tensor is the same bytes in the same order; then it has no gaps either."""
    return (
        is_plain(tensor)
        and tensor.stride() == room.stride()
        and tensor.shape == room.shape
        and tensor.dtype == room.dtype
        and tensor.device == room.device
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
