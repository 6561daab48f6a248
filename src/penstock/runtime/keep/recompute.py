"""Again: a part of a stage whose forward is run again within the backward, so that only its inputs are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["Recomputed"]

Run = Callable[[Sequence[Any]], Sequence[Any]]
# what to run a part within, both times: the same random numbers, the same autocast
Context = Callable[[], AbstractContextManager[Any]]


class Recomputed:
    """Runs the parts of one stage that are run again; `begin` says for each micro-batch what they run within."""

    def __init__(self) -> None:
        self._context: Context = nullcontext

    def begin(self, context: Context) -> None:
        """Begin a forward of the stage."""
        self._context = context

    def __call__(self, run: Run, values: Sequence[Any]) -> Sequence[Any]:
        """Run the next part now without a graph, and once more when its gradients are asked for."""
        context = self._context
        if not torch.is_grad_enabled():
            with context():
                return run(values)
        # an input that requires a gradient is needed, or autograd would not call back
        anchor = torch.zeros((), requires_grad=True)
        made = _RecomputedPart.apply(anchor, run, context, *values)  # type: ignore[no-untyped-call]
        return made if isinstance(made, tuple) else (made,)


class _RecomputedPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Any, ...]:  # noqa: ANN401 - what autograd hands over
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
        # what is handed on unchanged would be taken for a view of itself
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
