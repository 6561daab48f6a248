"""Limits: memory limits of searched schedules, in bytes, and the defaults where costs have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import CostError
from penstock.model.costs import Costs, StageCosts
from penstock.report.units import parse_bytes

__all__ = ["Limit", "limit_per_lane", "sized", "units_to_bytes"]


Limit = float | str | Sequence[float | str]  # bytes, as 16e9 or "16GiB"; one for all lanes or one per lane


def sized(costs: Costs | None, num_stages: int, *, pending_share: float = 0.5) -> StageCosts:
    """Return costs a stage; where bytes are not given, a stage micro-batch saves 1 and leaves a share pending.

    Half is what a transformer block leaves, roughly: the inputs of its matmuls, out of all that it saves.
    """
    given = costs or Costs()
    if given.saved_bytes is None:
        pending = pending_share if given.pending_bytes is None else given.pending_bytes
        given = replace(given, saved_bytes=1.0, pending_bytes=pending)
    return given.for_stages(num_stages)


def units_to_bytes(units: int, lane_of: Sequence[int], costs: StageCosts) -> tuple[float, ...]:
    """Return each lane's limit when it may hold so many micro-batches of all its stages: 1f1b's unit."""
    lanes = range(1 + max(lane_of))
    return tuple(
        units * sum(float(costs.saved_bytes[s]) for s, home in enumerate(lane_of) if home == lane) for lane in lanes
    )


def limit_per_lane(memory_limit: Limit | None, lanes: int) -> tuple[float, ...]:
    """Return one limit per lane, in bytes; infinite where none is given.

    >>> limit_per_lane(["1kB", 2000], 2)
    (1000.0, 2000.0)

    Raises:
        CostError: when it is not above zero, or not one number or one a lane.
    """
    if memory_limit is None:
        return (float("inf"),) * lanes
    try:
        given = np.asarray(_bytes(memory_limit), dtype=np.float64)
    except (TypeError, ValueError):
        words = f"memory_limit: {memory_limit!r:.80} is not a number of bytes"
        raise CostError(f'{words}; give one, as 16e9 or "16GiB", or a list with one per lane') from None
    if given.ndim > 1 or (given.ndim == 1 and len(given) != lanes):
        raise CostError(f"memory_limit must be one number or one for each of {lanes} lanes; given: {memory_limit!r}")
    if not (given > 0).all():
        raise CostError(f"memory_limit: {memory_limit!r} must be above zero")
    return tuple(np.broadcast_to(given, lanes).tolist())


def _bytes(given: Any) -> Any:  # noqa: ANN401 - whatever the user gave
    """Return texts as numbers; the rest as it is."""
    if isinstance(given, bool):
        raise TypeError(given)
    if isinstance(given, str):
        return parse_bytes(given)
    return [_bytes(item) for item in given] if isinstance(given, (list, tuple)) else given
