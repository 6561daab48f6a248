"""Gradient accumulation: add the gradients of a backward to those of the parameters in one fused operation.

Autograd adds each gradient as it comes, by a kernel of its own. In a large stage that is hundreds of small ones for
every micro-batch. A backward that Inductor compiled gives all gradients of its operations at the same time, so to hold
them until the end costs no memory to speak of, and then one kernel adds many. Otherwise it would cost a second set of
gradients: there autograd goes on as it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from penstock.compile.added_products import Sum, adding_to

__all__ = ["GradientAccumulation", "accumulated_together", "reached_once"]


class GradientAccumulation:
    """Whose gradients are added together; one for all lanes of a process.

    A loss may reach a parameter of any stage, by a penalty on its size, say. The last stage's backward then gives it a
    gradient while another lane runs its own, so autograd has to add that one: it lets only one thread do so at a time.
    """

    def __init__(self) -> None:
        self._reached: dict[int, nn.Parameter] = {}

    def observe(self, loss: torch.Tensor, own: Iterable[nn.Parameter]) -> None:
        """See what a loss reaches besides a stage's own parameters; before its backward, and so before all others'."""
        inside = set(map(id, own))
        # what a stage was given is a leaf too, and not to be kept
        found = [leaf for leaf in _leaves(loss) if isinstance(leaf, nn.Parameter)]
        self._reached |= {id(leaf): leaf for leaf in found if id(leaf) not in inside}

    def eligible(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that may be added together: a hook behind autograd's own addition wants to see its sum."""
        return [p for p in parameters if id(p) not in self._reached and not p._post_accumulate_grad_hooks]


@contextmanager
def accumulated_together(parameters: Iterable[nn.Parameter], outputs: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Let a backward leave its gradients apart, and add them at its end; where it fails, what products added stays.

    Args:
        parameters: that nobody else gives gradients to meanwhile.
        outputs: what the backward begins with, where products that it compiled may add to gradients themselves.
    """
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    once = set() if torch.is_anomaly_enabled() else reached_once(outputs)  # that looks at what nobody else reads
    sums = {id(p): Sum(p, old) for p, old in before if id(p) in once and _can_be_added_to(p, old)}
    for parameter, _ in before:
        parameter.grad = None  # autograd then puts the gradient here as it is
    made: list[torch.Tensor | None] = [None] * len(before)
    try:
        with adding_to(sums, outputs):
            yield
        made = [_left(p, sums.get(id(p))) for p, _ in before]
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    _add([(p, old, new) for (p, old), new in zip(before, made, strict=True) if new is not None])


def _left(parameter: nn.Parameter, own: Sum | None) -> torch.Tensor | None:
    """Return what is left to be added to a parameter's gradient."""
    if own is None or own.returned is None:
        return parameter.grad
    if not own.is_untouched():
        raise RuntimeError("compile: a parameter got a gradient in a way that autograd's graph does not show")
    return None


@torch.no_grad()
def _add(found: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> None:
    dense = [(old, new) for _, old, new in found if old.layout is torch.strided]
    if len({id(old) for old, _ in dense}) < len(dense):  # one gradient for two parameters: not at the same time
        for old, new in dense:
            old.add_(new)
    elif dense:
        torch._foreach_add_([old for old, _ in dense], [new for _, new in dense])
    for parameter, old, new in found:
        if old.layout is not torch.strided:
            parameter.grad = new + old  # as autograd does: with a dense one the sum is dense


def _can_be_added_to(parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
    """Return whether a product may add to a gradient: nobody looks at what it adds, and they are of one kind."""
    return (
        parameter.numel() > 0
        and not parameter._backward_hooks
        and gradient.layout is torch.strided
        and (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, parameter.dtype, parameter.device)
    )


def reached_once(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of parameters that get one gradient in a backward of tensors, and not the sum of several.

    None where code of the model's own is part of it, as a checkpoint: that may run a backward within.
    """
    counts: Counter[int] = Counter()
    for node in _nodes(tensors):
        if isinstance(node, BackwardCFunction) and type(node).__name__ != "CompiledFunctionBackward":
            return set()
        counts.update(id(following.variable) for following, _ in node.next_functions if _is_leaf(following))
    return {key for key, count in counts.items() if count == 1}


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a tensor's gradient will be added to."""
    yield from (node.variable for node in _nodes([tensor]) if _is_leaf(node))


def _nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield all nodes of autograd's graph behind tensors, each once."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _is_leaf(node: Any) -> bool:  # noqa: ANN401 - a node of autograd, or None
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
