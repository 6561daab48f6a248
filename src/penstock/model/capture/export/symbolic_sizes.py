"""Symbolic sizes: dimensions as functions of the batch size, and the shapes for which a trace is valid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch


def affine(size: object, symbols: frozenset[Any]) -> tuple[int, int] | None:
    """Return (fixed, per sample) for a size that is a linear function of the batch size, else None.

    All symbols of batched inputs stand for the same batch size.
    """
    if isinstance(size, int):
        return int(size), 0
    return _fit(size.node.expr, symbols) if isinstance(size, torch.SymInt) else None


def hint(size: object) -> int:
    """Return the value of a size during the trace."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[call-overload]


@lru_cache(maxsize=4096)  # a trace has a few expressions, each thousands of times
def _fit(expression: Any, symbols: frozenset[Any]) -> tuple[int, int] | None:  # noqa: ANN401 - of sympy
    if not expression.free_symbols <= symbols:
        return None
    points = [expression.subs(dict.fromkeys(expression.free_symbols, n)) for n in (2, 3, 7, 24)]
    if not all(point.is_Integer for point in points):
        return None
    at_2, at_3, at_7, at_24 = (int(point) for point in points)
    slope = at_3 - at_2
    fixed = at_2 - 2 * slope
    is_even = at_7 == fixed + 7 * slope and at_24 == fixed + 24 * slope
    return (fixed, slope) if is_even else None


class ShapeGuards:
    """The shape guards of a trace, which decide for which input shapes it is valid.

    While torch traces, it records every comparison of sizes in the model's code, such as `length % 8 == 0`. The trace
    is valid for all shapes for which each comparison has the same result.
    """

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        names = set(program.graph_signature.user_inputs)
        inputs = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
        self._shapes: list[tuple[object, ...]] = [tuple(map(_expression, node.meta["val"].shape)) for node in inputs]
        symbols = [size for node in inputs for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
        environment = symbols[0].node.shape_env if symbols else None
        same = dict(environment.replacements) if environment is not None else {}
        self._guards = [guard.expr.xreplace(same) for guard in environment.guards] if environment is not None else []
        self._known: dict[tuple[tuple[int, ...], ...], bool] = {}

    def allow(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether the trace is valid for inputs of these shapes."""
        key = tuple(tuple(shape) for shape in shapes)
        if key not in self._known:
            if len(self._known) >= _MOST_SHAPES:
                self._known.clear()
            self._known[key] = self._look(key)
        return self._known[key]

    def _look(self, shapes: tuple[tuple[int, ...], ...]) -> bool:
        size_of: dict[Any, int] = {}
        pairs = [pair for own, given in zip(self._shapes, shapes, strict=True) for pair in zip(own, given, strict=True)]
        for own, given in pairs:
            if getattr(own, "is_Symbol", False):
                size_of.setdefault(own, given)
        is_equal = all(_filled(own, size_of) == given for own, given in pairs)
        return is_equal and all(bool(_filled(guard, size_of) == True) for guard in self._guards)  # noqa: E712 - sympy's


_MOST_SHAPES = 1024


def _expression(size: object) -> object:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _filled(expression: Any, size_of: dict[Any, int]) -> Any:  # noqa: ANN401 - of sympy
    return expression if isinstance(expression, int) else expression.subs(size_of)
