"""Limits: memory limits of searched schedules, in bytes, and the defaults where costs have none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import CostError
from penstock.model.costs import Costs, StageCosts

__all__ = ["limit_per_lane", "sized", "units_to_bytes"]


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


def limit_per_lane(memory_limit: float | Sequence[float] | None, lanes: int) -> tuple[float, ...]:
    """Return one limit a lane; infinite where none is given.

    Raises:
        CostError: when it is not above zero, or not one number or one a lane.
    """
    if memory_limit is None:
        return (float("inf"),) * lanes
    try:
        if isinstance(memory_limit, (bool, str)):
            raise TypeError(memory_limit)
        given = np.asarray(memory_limit, dtype=np.float64)
    except (TypeError, ValueError):
        raise CostError(f"memory_limit: {memory_limit!r} is not a number of bytes, or one a lane") from None
    if given.ndim > 1 or (given.ndim == 1 and len(given) != lanes):
        raise CostError(f"memory_limit must be one number or one for each of {lanes} lanes; given: {memory_limit!r}")
    if not (given > 0).all():
        raise CostError(f"memory_limit: {memory_limit!r} must be above zero")
    return tuple(np.broadcast_to(given, lanes).tolist())
