"""Adding: what a backward gives to parameters is added to the gradients that they have all at once, not one by one.

Autograd adds each gradient as it comes, by a kernel of its own. In a large stage that is hundreds of small ones for
every micro-batch. A backward that Inductor compiled gives all gradients of its operations at the same time, so to hold
them until the end costs no memory to speak of, and then one kernel adds many. Otherwise it would cost a second set of
gradients: there autograd goes on as it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from penstock.model.added_products import adding_to

__all__ = ["Adding", "added_together", "reached_once"]


class Adding:
    """Whose gradients are added together; one for all lanes of a process.

    A loss may reach a parameter of any stage, by a penalty on its size, say. The last stage's backward then gives it a
    gradient while another lane runs its own, so autograd has to add that one: it lets only one thread do so at a time.

    Args:
        everyone: returns all parameters of these lanes.
    """

    def __init__(self, everyone: Callable[[], Iterable[nn.Parameter]] = tuple) -> None:
        self._everyone = everyone
        self._reached: dict[int, nn.Parameter] = {}

    def look(self, loss: torch.Tensor, own: Iterable[nn.Parameter]) -> None:
        """See what a loss reaches besides a stage's own parameters; before its backward, and so before all others'."""
        inside = set(map(id, own))
        # what a stage was given is a leaf too, and not to be kept
        found = [leaf for leaf in _leaves(loss) if isinstance(leaf, nn.Parameter)]
        self._reached |= {id(leaf): leaf for leaf in found if id(leaf) not in inside}

    def together(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those that may be added together: a hook behind autograd's own addition wants to see its sum."""
        return [p for p in parameters if id(p) not in self._reached and not p._post_accumulate_grad_hooks]

    def alone(self, parameters: Iterable[nn.Parameter], outputs: Iterable[torch.Tensor]) -> set[int]:
        """Return the ids of those that get one gradient in a backward of outputs, and share memory with no other."""
        once = reached_once(outputs)
        places = Counter(p.data_ptr() for p in {id(p): p for p in self._everyone()}.values())
        return {id(p) for p in parameters if id(p) in once and places[p.data_ptr()] <= 1}


@contextmanager
def added_together(parameters: Iterable[nn.Parameter], alone: Collection[int] = ()) -> Iterator[None]:
    """Let a backward leave its gradients apart, and add them at its end; where it fails, what products added stays.

    Args:
        parameters: that nobody else gives gradients to meanwhile.
        alone: the ids of those that get one gradient in it: where a compiled product makes it, that adds it right away.
    """
    before = [(p, p.grad) for p in parameters if p.grad is not None]
    sums = {p.data_ptr(): old for p, old in before if id(p) in alone and _can_be_added_to(p, old)}
    for parameter, _ in before:
        parameter.grad = None  # autograd then puts the gradient here as it is
    made: list[torch.Tensor | None] = [None] * len(before)
    try:
        with adding_to(sums) as done:
            yield
        made = [None if p.data_ptr() in done else p.grad for p, _ in before]
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
    _add([(p, old, new) for (p, old), new in zip(before, made, strict=True) if new is not None])


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
    """Return the ids of parameters that get one gradient in a backward of tensors, and not the sum of several."""
    counts: Counter[int] = Counter()
    waiting, seen = [tensor.grad_fn for tensor in tensors], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                counts[id(leaf)] += 1
            else:
                waiting.append(following)
    return {key for key, count in counts.items() if count == 1}


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what a tensor's gradient will be added to."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]
