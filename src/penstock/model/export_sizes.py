"""Sizes: what torch.export says of a dimension, as a function of the batch size."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

__all__ = ["affine", "hint"]


def affine(size: object, symbols: frozenset[Any]) -> tuple[int, int] | None:
    """Return (fixed, per sample) for a size that grows evenly with the batch, else None.

    All symbols of batched inputs stand for the one batch size.
    """
    if isinstance(size, int):
        return int(size), 0
    return _fit(size.node.expr, symbols) if isinstance(size, torch.SymInt) else None


def hint(size: object) -> int:
    """Return what a size was when the trace was made."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[call-overload]


@lru_cache(maxsize=4096)  # the same few expressions come by thousands of times
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
