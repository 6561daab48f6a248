"""Compound stages: stages of several pieces, some of which run differently, for example with recompute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.compile.options import Options
from penstock.errors import UsageError
from penstock.model.stages import Chain, HeldTensors, Program, Stage

# runs one piece: takes a function from values to values, and the values
RunPiece = Callable[[Callable[[Sequence[Any]], Sequence[Any]], Sequence[Any]], Sequence[Any]]


class _Compound:
    """The programs of consecutive pieces, run in order."""

    reassigned: tuple[str, ...] = ()

    def __init__(
        self, pieces: Sequence[Stage], is_special: Sequence[bool], run_piece: RunPiece, later: set[str]
    ) -> None:
        self._pieces, self._is_special, self._run_piece = pieces, is_special, run_piece
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
        raise UsageError("compile: parts of stages are recomputed")

    def run(self, held: HeldTensors, values: Sequence[Any], batch_size: int) -> tuple[Any, ...]:  # noqa: ARG002
        """Compute the outputs from the inputs; each piece uses its own held tensors."""
        known = dict(zip(self.inputs, values, strict=True))
        for piece, is_special in zip(self._pieces, self._is_special, strict=True):
            given = [known[name] for name in piece.inputs]

            def run(inside: Sequence[Any], piece: Stage = piece) -> Sequence[Any]:
                made: Sequence[Any] = piece(*inside, batch_size=batch_size)
                return made

            made = self._run_piece(run, given) if is_special else run(given)
            known.update(zip(piece.outputs, made, strict=True))
        return tuple(known[name] for name in self.outputs)


def compound_chain(
    chain: Chain, groups: Sequence[Sequence[int]], special: set[int], make_runner: Callable[[], RunPiece]
) -> Chain:
    """Return a chain in which each stage is a group of another chain's stages.

    Args:
        chain: many small stages, which must all pass only named values.
        groups: the numbers of the small stages of each stage, in order.
        special: the numbers of the small stages that `runner` runs.
        make_runner: makes a runner for each stage, which becomes its attribute `runner`.
    """
    stages: list[Stage] = []
    for index, group in enumerate(groups):
        pieces = [chain.stages[number] for number in group]
        rest = [chain.stages[number] for other in groups[index + 1 :] for number in other]

        runner = make_runner()

        def program_of(
            training: bool, pieces: Sequence[Stage] = pieces, rest: Sequence[Stage] = rest,
            group: Sequence[int] = group, runner: RunPiece = runner,
        ) -> Program:  # fmt: skip
            for piece in (*pieces, *rest):
                piece.train(training)
            later = {name for stage in rest for name in stage.inputs} | set(chain.results(training).names)
            return _Compound(pieces, [number in special for number in group], runner, later)

        tensors = {name: piece.held.get(name) for piece in pieces for name in piece.held}
        kept = {name for piece in pieces for name in piece.state_dict()}
        stage = Stage(index, tensors=tensors, program_of=_once(program_of, chain), unsaved=set(tensors) - kept)
        stage.runner, stage.held.pieces = runner, [piece.held for piece in pieces]
        stages.append(stage.train(chain.training))
    return chain.with_stages(stages)


def _once(program_of: Callable[[bool], Program], chain: Chain) -> Callable[[bool], Program]:
    made: dict[tuple[bool, int], Program] = {}

    def program(training: bool) -> Program:
        key = (training, chain.form)
        if key not in made:
            made[key] = program_of(training)
        return made[key]

    return program
