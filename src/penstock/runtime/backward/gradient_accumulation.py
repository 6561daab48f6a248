"""Gradient accumulation: adds the gradients of a backward to those of the parameters in one fused operation.

Autograd adds each gradient when it arrives, with a kernel of its own. For a large stage, these are hundreds of small
kernels per micro-batch. A backward that Inductor compiled returns the gradients of all its operations at the same time.
Holding them until the end costs almost no memory, and then one kernel adds many gradients. For other backwards it
would cost a second set of gradients, so autograd adds as usual there.
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


class GradientAccumulation:
    """The choice of the parameters whose gradients are added together; one object serves all lanes of a process.

    A loss may reach a parameter of any stage, for example by a penalty on its size. The last stage's backward then
    gives this parameter a gradient while another lane runs its own backward. Autograd must add the gradients of such
    a parameter, because it lets only one thread add at a time.
    """

    def __init__(self) -> None:
        self._reached: dict[int, nn.Parameter] = {}

    def observe(self, loss: torch.Tensor, own: Iterable[nn.Parameter]) -> None:
        """Record the parameters of other stages that a loss reaches; call it before any backward of the step."""
        inside = set(map(id, own))
        # the inputs of a stage are leaves too, but must not be kept
        found = [leaf for leaf in _leaves(loss) if isinstance(leaf, nn.Parameter)]
        self._reached |= {id(leaf): leaf for leaf in found if id(leaf) not in inside}

    def eligible(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters whose gradients may be added together.

        A post-accumulate hook expects autograd's own sum, so autograd adds the gradients of its parameter.
        """
        return [p for p in parameters if id(p) not in self._reached and not p._post_accumulate_grad_hooks]


@contextmanager
def accumulated_together(parameters: Iterable[nn.Parameter], outputs: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Hold the gradients of a backward, and add them at its end.

    If the backward fails, the parameters keep their old gradients, except for what products have already added.

    Args:
        parameters: parameters that get no gradients from elsewhere meanwhile.
        outputs: the tensors where the backward begins, if its compiled products may add to gradients themselves.
    """
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    # anomaly detection checks all results for NaN, even the unused memory that an added product returns
    once = set() if torch.is_anomaly_enabled() else reached_once(outputs)
    sums = {id(p): Sum(p, old) for p, old in before if id(p) in once and _can_be_added_to(p, old)}
    for parameter, _ in before:
        parameter.grad = None  # autograd then stores the new gradient here, without an addition
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
    """Return the gradient that must still be added to a parameter's gradient; None if there is none."""
    if own is None or own.returned is None:
        return parameter.grad
    if not own.is_untouched():
        raise RuntimeError("compile: a parameter got a gradient in a way that autograd's graph does not show")
    return None


@torch.no_grad()
def _add(found: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]) -> None:
    dense = [(old, new) for _, old, new in found if old.layout is torch.strided]
    if len({id(old) for old, _ in dense}) < len(dense):  # parameters share a gradient: add one after another
        for old, new in dense:
            old.add_(new)
    elif dense:
        torch._foreach_add_([old for old, _ in dense], [new for _, new in dense])
    for parameter, old, new in found:
        if old.layout is not torch.strided:
            parameter.grad = new + old  # as autograd does: a sum with a dense gradient is dense


def _can_be_added_to(parameter: nn.Parameter, gradient: torch.Tensor) -> bool:
    """Return whether a product may add to a gradient: no hook sees the addend, and shape, dtype and device agree."""
    return (
        parameter.numel() > 0
        and not parameter._backward_hooks
        and gradient.layout is torch.strided
        and (gradient.shape, gradient.dtype, gradient.device) == (parameter.shape, parameter.dtype, parameter.device)
    )


def reached_once(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the parameters that get exactly one gradient in a backward of some tensors.

    The result is empty if the graph contains custom functions, such as activation checkpointing: these may run a
    nested backward.
    """
    counts: Counter[int] = Counter()
    for node in _nodes(tensors):
        if isinstance(node, BackwardCFunction) and type(node).__name__ != "CompiledFunctionBackward":
            return set()
        counts.update(id(following.variable) for following, _ in node.next_functions if _is_leaf(following))
    return {key for key, count in counts.items() if count == 1}


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the leaves to which a backward of a tensor adds gradients."""
    yield from (node.variable for node in _nodes([tensor]) if _is_leaf(node))


def _nodes(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graph of some tensors once."""
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
