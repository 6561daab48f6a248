"""Batch loss: one loss on the outputs of all micro-batches, for losses that couple samples.

The last stage adds its results, one micro-batch after another. After the last one, the results are joined, the loss is
computed once, and its backward gives each micro-batch its part of the gradient. The graph of the loss is then freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.model.structure import flatten, rebuild
from penstock.runtime.micro_batches import join_dim_of


class BatchLoss:
    """The loss on the batch of one step.

    Args:
        sizes: the number of samples of each micro-batch.
        dim: the batch dimension.
        target_dims: for each tensor of the target, the dimension in which it was cut; None if it was not cut.
        loss_of: a function from the results and the target of the whole batch to the loss and its metrics.
    """

    def __init__(
        self, sizes: Sequence[int], dim: int, target_dims: Sequence[int | None],
        loss_of: Callable[[Sequence[Any], tuple[Any, ...]], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    ) -> None:  # fmt: skip
        self._sizes, self._dim, self._target_dims, self._loss_of = sizes, dim, target_dims, loss_of
        self._leaves: list[Any] = []  # the joined results; `_leaf_dims` has the dimension of each
        self._leaf_dims: list[int | None] = []
        self._results: dict[int, list[Any]] = {}
        self._targets: dict[int, tuple[Any, ...]] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}

    def empty_copy(self) -> BatchLoss:
        """Return a batch loss for the same batch, without results."""
        return BatchLoss(self._sizes, self._dim, self._target_dims, self._loss_of)

    def add(self, mb: int, results: Sequence[Any], target: tuple[Any, ...]) -> bool:
        """Add the results of a micro-batch; return whether all micro-batches have results now."""
        self._results[mb] = [r.detach() if isinstance(r, torch.Tensor) else r for r in results]
        self._targets[mb] = target
        return len(self._results) == len(self._sizes)

    def compute(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the batch, and its metrics.

        If gradients are enabled, the loss has a graph. Run its backward, then call `share`.
        """
        columns = list(zip(*(self._results[mb] for mb in range(len(self._sizes))), strict=True))
        self._leaf_dims = [self._dim_of(pieces) for pieces in columns]
        self._leaves = [_join(pieces, dim) for pieces, dim in zip(columns, self._leaf_dims, strict=True)]
        for value in self._leaves:
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
                value.requires_grad_(torch.is_grad_enabled())
        self._results = {}
        return self._loss_of(self._leaves, self._target())

    def share(self) -> None:
        """Divide the gradients of the joined results among the micro-batches."""
        self._gradients = {mb: [] for mb in range(len(self._sizes))}
        for leaf, dim in zip(self._leaves, self._leaf_dims, strict=True):
            gradient = leaf.grad if isinstance(leaf, torch.Tensor) else None
            for mb, gradients in self._gradients.items():
                if gradient is None or dim is None:  # not joined: the first micro-batch gets the whole gradient
                    gradients.append(gradient if mb == 0 else None)
                else:
                    gradients.append(torch.split(gradient, list(self._sizes), dim)[mb])
        self._leaves = []

    def gradients_of(self, mb: int) -> list[torch.Tensor | None]:
        """Remove and return the gradient of each result of a micro-batch."""
        return self._gradients.pop(mb)

    def _dim_of(self, pieces: Sequence[Any]) -> int | None:
        is_tensor = all(isinstance(piece, torch.Tensor) for piece in pieces)
        return join_dim_of(pieces, self._sizes, self._dim) if is_tensor else None

    def _target(self) -> tuple[Any, ...]:
        targets = [self._targets[mb] for mb in range(len(self._sizes))]
        self._targets = {}
        found = [flatten(target, apart=True) for target in targets]
        columns = zip(*(tensors for tensors, _ in found), strict=True)
        joined = [_join(pieces, dim) for pieces, dim in zip(columns, self._target_dims, strict=True)]
        rebuilt: tuple[Any, ...] = rebuild(found[0][1], joined)
        return rebuilt


def _join(pieces: Sequence[Any], dim: int | None) -> Any:  # noqa: ANN401 - a tensor, or a plain value
    if dim is not None:
        return torch.cat(list(pieces), dim)
    first = pieces[0]
    if not isinstance(first, torch.Tensor):
        return first
    if any(piece.shape != first.shape for piece in pieces):
        shapes = ", ".join(str(tuple(piece.shape)) for piece in pieces[:4])
        raise UsageError(
            f"loss_over: an output has the shapes {shapes} in the micro-batches, so it cannot be joined along the "
            "batch dimension; let the model return one row per sample"
        )
    return first.clone()
