"""Weight sources: finds the tensors that depend only on parameters, so that their gradients can be deferred."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_LARGEST = 64  # nodes in the graph of a weight: weight norm has 1, a spectral norm or an adapter about 12

# Nodes that save nothing for the backward: both I and W may walk them.
_STATELESS = frozenset(
    f"{name}Backward{number}"
    for name in (
        "Alias", "AsStrided", "Cat", "Clone", "Conj", "Diagonal", "Expand", "Flip", "Neg", "Permute", "Repeat",
        "ReshapeAlias", "Roll", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy",
        "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View", "ViewAsComplex", "ViewAsReal",
    )
    for number in range(4)
)  # fmt: skip


class Weight(NamedTuple):
    """A tensor that depends only on parameters."""

    tensor: torch.Tensor  # a parameter, or a tensor computed from parameters
    leaves: tuple[nn.Parameter, ...]  # the parameters
    stateful: tuple[Any, ...]  # the nodes of its graph that can be walked only once


def find_weight(tensor: object, *, may_be_computed: bool) -> Weight | None:
    """Return a tensor as a weight; None if it is not a weight, or requires no gradient.

    Activations depend on the stage's inputs or on an anchor, never on parameters alone. If an argument could also be
    an activation, only parameters under views, transpositions and casts count as weights. Otherwise the argument is
    always a weight, and `may_be_computed` from parameters in any way.
    """
    if not is_plain(tensor) or not tensor.requires_grad:
        return None
    if tensor.grad_fn is None:
        return Weight(tensor, (tensor,), ()) if isinstance(tensor, nn.Parameter) else None
    return _computed(tensor) if may_be_computed else _chain(tensor)


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Return whether this is an ordinary tensor: dense, and not of a class with its own rules."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def _chain(tensor: torch.Tensor) -> Weight | None:
    """Return the weight if only views, transpositions and casts lie between a tensor and one parameter."""
    node: Any = tensor.grad_fn
    while type(node).__name__ in _STATELESS:
        sources = node.next_functions
        if len(sources) != 1:
            return None
        node = sources[0][0]
    leaf = node.variable if isinstance(node, _Leaf) else None
    return Weight(tensor, (leaf,), ()) if isinstance(leaf, nn.Parameter) else None


def _computed(tensor: torch.Tensor) -> Weight | None:
    """Return the weight if the whole graph of a tensor is small and ends only in parameters."""
    leaves: list[nn.Parameter] = []
    stateful: list[Any] = []
    todo: list[Any] = [tensor.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if isinstance(node, _Leaf):
            if not isinstance(node.variable, nn.Parameter):
                return None
            leaves.append(node.variable)  # every parameter has one such node
            continue
        if type(node).__name__ not in _STATELESS:
            stateful.append(node)
        sources = {source for source, _ in node.next_functions if source is not None} - seen
        seen |= sources
        todo += sources
        if len(seen) > _LARGEST:
            return None
    return Weight(tensor, tuple(leaves), tuple(stateful))
