"""Micro-batches: cut a batch and its target into micro-batches, and join the results of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.model.example import Call
from penstock.model.structure import flatten, rebuild
from penstock.runtime.step import Batch


def sizes_of(batch_size: int, num_mbs: int) -> list[int]:
    """Return the number of samples of each micro-batch, as even as possible; fewer micro-batches if samples are few.

    >>> sizes_of(10, 4), sizes_of(3, 4)
    ([3, 3, 2, 2], [1, 1, 1])
    """
    count = min(batch_size, num_mbs)
    return [batch_size // count + (index < batch_size % count) for index in range(count)]


def cut_batch(call: Call, sizes: Sequence[int]) -> Batch:
    """Return a call of the model as micro-batches; tensors without a batch dimension go whole to all of them."""
    columns = {
        name: (tensor,) * len(sizes) if dim is None else torch.split(tensor, list(sizes), dim)
        for name, tensor, dim in zip(call.names, call.tensors, call.batch_dims, strict=True)
    }
    return Batch([{name: pieces[mb] for name, pieces in columns.items()} for mb in range(len(sizes))], sizes)


def cut_structure(thing: object, batch_size: int, sizes: Sequence[int], dim: int = 0) -> list[Any]:
    """Cut a target, or another structure of tensors, into one part per micro-batch.

    The batch dimension of a tensor is `dim`, if it has the batch size there, otherwise the first. A tensor without a
    batch dimension goes whole to all micro-batches.
    """
    tensors, template = flatten(thing, apart=True)
    if not tensors:
        return [thing] * len(sizes)
    pieces = []
    for tensor in tensors:
        own = batch_dim_of(tensor, batch_size, dim)
        pieces.append((tensor,) * len(sizes) if own is None else torch.split(tensor, list(sizes), own))
    return [rebuild(template, [piece[mb] for piece in pieces]) for mb in range(len(sizes))]


def batch_dim_of(tensor: torch.Tensor, size: int, dim: int) -> int | None:
    """Return the dimension of a tensor that has the batch size: `dim`, otherwise the first; None if neither has it.

    >>> batch_dim_of(torch.zeros(5, 3), 3, 1), batch_dim_of(torch.zeros(3), 3, 1), batch_dim_of(torch.zeros(4), 3, 0)
    (1, 0, None)
    """
    return next((d for d in dict.fromkeys((dim, 0)) if tensor.dim() > d and tensor.shape[d] == size), None)


def move_to(device: torch.device, thing: Any) -> Any:  # noqa: ANN401 - any structure
    """Return a structure with all its tensors on a device; the structure itself if they are there already."""
    tensors, template = flatten(thing, apart=True)
    if all(tensor.device == device for tensor in tensors):
        return thing
    return rebuild(template, [tensor.to(device, non_blocking=device.type == "cuda") for tensor in tensors])


def join_dim_of(pieces: Sequence[torch.Tensor], sizes: Sequence[int], dim: int) -> int | None:
    """Return the dimension along which parts of a result, one per micro-batch, can be joined; None if there is none.

    >>> join_dim_of([torch.zeros(2, 4), torch.zeros(1, 4)], [2, 1], 0)
    0
    >>> join_dim_of([torch.eye(2), torch.eye(1)], [2, 1], 0)  # one number per pair of samples
    """
    dims = {batch_dim_of(piece, size, dim) for piece, size in zip(pieces, sizes, strict=True)}
    own = dims.pop() if len(dims) == 1 else None
    if own is None:
        return None
    rests = {(*piece.shape[:own], *piece.shape[own + 1 :]) for piece in pieces}
    return own if len(rests) == 1 else None


def join_rows(results: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the results of the micro-batches of a custom split as results of the batch.

    The number of rows of a result is unknown. So results whose rows have the same shape are joined along the first
    dimension. `join_results` handles the other results, such as numbers.
    """
    joined = []
    for pieces in zip(*results, strict=True):
        if pieces[0].dim() and len({piece.shape[1:] for piece in pieces}) == 1:
            joined.append(torch.cat(list(pieces)))
        else:
            joined += join_results([[piece] for piece in pieces], sizes)
    return joined


def join_results(results: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], dim: int = 0) -> list[torch.Tensor]:
    """Return the results of all micro-batches as results of the batch.

    A result with a batch dimension (`dim`, otherwise the first) is joined along it. A floating-point number without
    dimensions is averaged, weighted by samples. Any other result is taken from the first micro-batch.
    """
    joined = []
    for pieces in zip(*results, strict=True):
        own = join_dim_of(pieces, sizes, dim)
        if own is not None:
            joined.append(torch.cat(list(pieces), own))
        elif pieces[0].dim() == 0 and pieces[0].is_floating_point():
            shares = [piece * (size / sum(sizes)) for piece, size in zip(pieces, sizes, strict=True)]
            joined.append(torch.stack(shares).sum())
        else:
            joined.append(pieces[0])
    return joined
