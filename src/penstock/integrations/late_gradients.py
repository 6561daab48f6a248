"""Late gradients: a step whose gradients reach the parameters in `loss.backward()`, for loops that call it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.pipeline.pipeline import Pipeline


def step_before_backward(pipe: Pipeline, batch: object, *target: object) -> torch.Tensor:
    """Run a step, and return a loss whose `backward` adds the gradients to the parameters.

    The loss behaves as that of the plain model: a loop may divide it, add other losses to it, and call `zero_grad`
    before its `backward`. Until then, the gradients of the step need memory of their own.

    Raises:
        UsageError: if the batch is not like the example, or the schedule updates weights within the step.
    """
    parameters = list({id(p): p for p in (*pipe.parameters(), *_parameters_of(pipe.internals.loss))}.values())
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        loss = pipe.step(batch, *target)
        made = [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
    pairs = [(p, gradient.clone()) for p, gradient in zip(parameters, made, strict=True) if gradient is not None]
    anchor = torch.zeros((), device=loss.device, requires_grad=True)
    found: torch.Tensor = _Late.apply(anchor, loss.detach(), pairs)  # type: ignore[no-untyped-call]  # torch's
    return found


def _parameters_of(loss: object) -> Sequence[nn.Parameter]:
    return list(loss.parameters()) if isinstance(loss, nn.Module) else []


class _Late(torch.autograd.Function):
    """The identity of a loss; its backward adds finished gradients, times the gradient of the loss."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, pairs: list[Any]) -> torch.Tensor:  # noqa: ARG004
        """Return the loss."""
        ctx.pairs = pairs
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Add the gradients of the step."""
        for parameter, made in ctx.pairs:
            scaled = made * gradient.to(made.device, made.dtype)
            parameter.grad = scaled if parameter.grad is None else parameter.grad + scaled
        return torch.zeros_like(gradient), None, None
