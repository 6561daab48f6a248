"""Weights: which tensors are made of parameters alone, so that their gradients may wait."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

__all__ = ["Weight", "find_weight", "is_plain"]

_Leaf: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_LARGEST = 64  # nodes of a weight's own graph: weight norm has 1, a spectral norm or an adapter a dozen

# Nodes that keep nothing for the backward: these may be walked by I and again by W.
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
    """A tensor that depends on nothing but parameters.

    Attributes:
        tensor: a parameter, or what was made of parameters.
        leaves: the parameters.
        stateful: the nodes of its graph that can be walked only once.
    """

    tensor: torch.Tensor
    leaves: tuple[nn.Parameter, ...]
    stateful: tuple[Any, ...]


def find_weight(tensor: object, *, may_be_computed: bool) -> Weight | None:
    """Return a tensor as a weight, if it is one that wants a gradient.

    Activations depend on what the stage received or on an anchor, never on parameters alone; where an argument may
    as well be an activation, only parameters under views, transpositions and casts count.

    Args:
        tensor: an argument of an operation.
        may_be_computed: whether the argument is always a weight, which may be computed from parameters in any way.
    """
    if not is_plain(tensor) or not tensor.requires_grad:
        return None
    if tensor.grad_fn is None:
        return Weight(tensor, (tensor,), ()) if isinstance(tensor, nn.Parameter) else None
    return _computed(tensor) if may_be_computed else _chain(tensor)


def is_plain(tensor: object) -> TypeGuard[torch.Tensor]:
    """Return whether this is an ordinary tensor: dense, and of no class with rules of its own."""
    if type(tensor) is not torch.Tensor and type(tensor) is not nn.Parameter:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def _chain(tensor: torch.Tensor) -> Weight | None:
    """Follow views, transpositions and casts to the one parameter under them."""
    node: Any = tensor.grad_fn
    while type(node).__name__ in _STATELESS:
        sources = node.next_functions
        if len(sources) != 1:
            return None
        node = sources[0][0]
    leaf = node.variable if isinstance(node, _Leaf) else None
    return Weight(tensor, (leaf,), ()) if isinstance(leaf, nn.Parameter) else None


def _computed(tensor: torch.Tensor) -> Weight | None:
    """Walk the whole graph of a tensor, as long as it is small and ends in parameters."""
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
