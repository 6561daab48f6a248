"""Recompute: parts of a stage whose forward runs again within the backward, so that only their inputs are kept.

Such a stage is compound: it consists of several pieces, which are stages themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from penstock.compile.options import Options
from penstock.errors import UsageError
from penstock.model.stages import Chain, HeldTensors, Program, Stage

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


class _Compound:
    """The programs of consecutive pieces, run in order; some of them are recomputed."""

    reassigned: tuple[str, ...] = ()

    def __init__(
        self, pieces: Sequence[Stage], is_recomputed: Sequence[bool], runner: Recomputed, later: set[str]
    ) -> None:
        self._pieces, self._is_recomputed, self._runner = pieces, is_recomputed, runner
        made: dict[str, None] = {}
        needed: dict[str, None] = {}
        for piece in pieces:
            needed.update(dict.fromkeys(name for name in piece.inputs if name not in made))
            made.update(dict.fromkeys(piece.outputs))
        self.inputs = tuple(needed)
        self.outputs = tuple(name for name in made if name in later)
        self.held_names = tuple(dict.fromkeys(name for piece in pieces for name in piece.held))
        self.is_fixed = all(getattr(piece.program, "is_fixed", False) for piece in pieces)

    def compile(self, options: Options) -> None:  # noqa: ARG002
        """Raise: a stage with recomputed parts cannot be compiled."""
        raise UsageError(
            "compile: stages with recomputed parts cannot be compiled; leave compile= out, or change keep="
        )

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Compute the outputs from the inputs; each piece uses its own held tensors."""
        known = dict(zip(self.inputs, values, strict=True))
        for piece, is_recomputed in zip(self._pieces, self._is_recomputed, strict=True):
            given = [known[name] for name in piece.inputs]

            def run(inside: Sequence[Any], piece: Stage = piece) -> Sequence[Any]:
                made: Sequence[Any] = piece(*inside, batch_size=batch_size)
                return made

            made = self._runner(run, given) if is_recomputed else run(given)
            known.update(zip(piece.outputs, made, strict=True))
        return tuple(known[name] for name in self.outputs)


def compound_chain(chain: Chain, groups: Sequence[Sequence[int]], recomputed: Container[int]) -> Chain:
    """Return a chain in which each stage is a group of another chain's stages.

    Args:
        chain: many small stages, which must all pass only named values.
        groups: the numbers of the small stages of each stage, in order.
        recomputed: the numbers of the small stages that are recomputed.
    """
    return chain.with_stages([_compound(chain, groups, index, recomputed) for index in range(len(groups))])


def _compound(chain: Chain, groups: Sequence[Sequence[int]], index: int, recomputed: Container[int]) -> Stage:
    pieces = [chain.stages[number] for number in groups[index]]
    rest = [chain.stages[number] for other in groups[index + 1 :] for number in other]
    runner = Recomputed()
    made: dict[tuple[bool, int], Program] = {}

    def program_of(training: bool) -> Program:
        key = (training, chain.form)
        if key not in made:
            for piece in (*pieces, *rest):
                piece.train(training)
            later = {name for stage in rest for name in stage.inputs} | set(chain.results(training).names)
            made[key] = _Compound(pieces, [number in recomputed for number in groups[index]], runner, later)
        return made[key]

    tensors = {name: piece.held.get(name) for piece in pieces for name in piece.held}
    kept = {name for piece in pieces for name in piece.state_dict()}
    stage = Stage(index, tensors=tensors, program_of=program_of, unsaved=set(tensors) - kept)
    stage.runner, stage.held.pieces = runner, [piece.held for piece in pieces]
    return stage.train(chain.training)
