"""Recompute: parts of a stage whose forward runs again within the backward, so that only their inputs are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Run = Callable[[Sequence[Any]], Sequence[Any]]
# the context in which a part runs, both times: the same random numbers, the same autocast
Context = Callable[[], AbstractContextManager[Any]]


class Recomputed:
    """The runner of the recomputed parts of a stage; `begin` sets their context for each micro-batch."""

    def __init__(self) -> None:
        self._context: Context = nullcontext

    def begin(self, context: Context) -> None:
        """Begin a forward of the stage, with the context for its parts."""
        self._context = context

    def __call__(self, run: Run, values: Sequence[Any]) -> Sequence[Any]:
        """Run the next part now without a graph, and again when the backward needs its gradients."""
        context = self._context
        if not torch.is_grad_enabled():
            with context():
                return run(values)
        # autograd calls the backward only if an input requires a gradient
        anchor = torch.zeros((), requires_grad=True)
        made = _RecomputedPart.apply(anchor, run, context, *values)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)


class _RecomputedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:  # noqa: ANN401 - the arguments of `apply`
        _, run, context, *values = given
        ctx.run, ctx.context = run, context
        places = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
        ctx.places, ctx.values = places, [None if place in places else v for place, v in enumerate(values)]
        ctx.wants = [values[place].requires_grad for place in places]
        ctx.save_for_backward(*(values[place] for place in places))
        with torch.no_grad(), context():
            made = tuple(run(values))
        ctx.mark_non_differentiable(
            *(m for m in made if isinstance(m, torch.Tensor) and not (m.is_floating_point() or m.is_complex()))
        )
        same = {id(value) for value in values}
        # autograd would treat an input that is returned unchanged as a view of itself
        return tuple(m.view_as(m) if isinstance(m, torch.Tensor) and id(m) in same else m for m in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:  # noqa: ANN401
        values = list(ctx.values)
        for place, tensor, wants in zip(ctx.places, ctx.saved_tensors, ctx.wants, strict=True):
            values[place] = tensor.detach().requires_grad_(wants)
        with torch.enable_grad(), ctx.context():
            made = ctx.run(values)
        pairs = [
            (m, g)
            for m, g in zip(made, gradients, strict=True)
            if isinstance(m, torch.Tensor) and m.requires_grad and g is not None
        ]
        if pairs:
            torch.autograd.backward([m for m, _ in pairs], [g for _, g in pairs])
        found = [value.grad if isinstance(value, torch.Tensor) else None for value in values]
        return (None, None, None, *found)
