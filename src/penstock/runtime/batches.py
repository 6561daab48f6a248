"""Batches: cut a batch and its target into micro-batches, and put results of micro-batches together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.model.example import Call
from penstock.model.structure import flatten, rebuild
from penstock.runtime.step import Batch

__all__ = ["cut_batch", "cut_thing", "join_results", "move_to", "sizes_of"]


def sizes_of(batch_size: int, num_mbs: int) -> list[int]:
    """Return the samples of each micro-batch, as even as can be; fewer micro-batches where samples are few.

    >>> sizes_of(10, 4), sizes_of(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    count = min(batch_size, num_mbs)
    return [batch_size // count + (index < batch_size % count) for index in range(count)]


def cut_batch(call: Call, num_mbs: int, is_batched: Sequence[bool]) -> Batch:
    """Return a call of the model as micro-batches; tensors without a batch go to all of them whole."""
    sizes = sizes_of(call.batch_size, num_mbs)
    columns = {
        name: torch.split(tensor, sizes) if own else (tensor,) * len(sizes)
        for name, tensor, own in zip(call.names, call.tensors, is_batched, strict=True)
    }
    return Batch([{name: pieces[mb] for name, pieces in columns.items()} for mb in range(len(sizes))], sizes)


def cut_thing(thing: object, batch_size: int, sizes: Sequence[int]) -> list[Any]:
    """Return a target, or whatever holds tensors, as one for each micro-batch; what has no batch goes to all whole."""
    if isinstance(thing, torch.Tensor) and thing.dim() and thing.shape[0] == batch_size:
        return list(torch.split(thing, list(sizes)))
    tensors, template = flatten(thing, apart=True)
    if not tensors:
        return [thing] * len(sizes)
    pieces = [
        torch.split(tensor, list(sizes)) if tensor.dim() and tensor.shape[0] == batch_size else (tensor,) * len(sizes)
        for tensor in tensors
    ]
    return [rebuild(template, [piece[mb] for piece in pieces]) for mb in range(len(sizes))]


def move_to(device: torch.device, thing: Any) -> Any:  # noqa: ANN401 - whatever holds tensors
    """Return a target, or whatever holds tensors, with all of them on a device; itself where they are there."""
    tensors, template = flatten(thing, apart=True)
    if all(tensor.device == device for tensor in tensors):
        return thing
    return rebuild(template, [tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors])


def join_results(results: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the results of all micro-batches as those of the batch.

    What has the micro-batch as its first dimension is joined, a number without dimensions averaged by samples, and
    what does not follow the batch is taken from the first.
    """
    joined = []
    for pieces in zip(*results, strict=True):
        if all(piece.dim() and piece.shape[0] == size for piece, size in zip(pieces, sizes, strict=True)):
            joined.append(torch.cat(list(pieces)))
        elif pieces[0].dim() == 0 and pieces[0].is_floating_point():
            shares = [piece * (size / sum(sizes)) for piece, size in zip(pieces, sizes, strict=True)]
            joined.append(torch.stack(shares).sum())
        else:
            joined.append(pieces[0])
    return joined
