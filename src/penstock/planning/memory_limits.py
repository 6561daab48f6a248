"""Memory limits: limits of lanes in bytes, and default sizes for costs without bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.errors import CostError
from penstock.model.costs import Costs, StageCosts
from penstock.report.units import parse_bytes

Limit = float | str | Sequence[float | str]  # bytes, as 16e9 or "16GiB"; one for all lanes or one per lane


def sized(costs: Costs | None, num_stages: int, *, pending_share: float = 0.5) -> StageCosts:
    """Return the costs of each stage; without given bytes, a stage saves 1 per micro-batch and leaves a share pending.

    The default share is roughly that of a transformer block: the inputs of its matmuls are half of what it saves.
    """
    given = costs or Costs()
    if given.saved_bytes is None:
        pending = pending_share if given.pending_bytes is None else given.pending_bytes
        given = replace(given, saved_bytes=1.0, pending_bytes=pending)
    return given.for_stages(num_stages)


def units_to_bytes(units: int, lane_of: Sequence[int], costs: StageCosts) -> tuple[float, ...]:
    """Return the limit of each lane if it may hold `units` micro-batches of all its stages, the unit of 1f1b."""
    lanes = range(1 + max(lane_of))
    return tuple(
        units * sum(float(costs.saved_bytes[s]) for s, home in enumerate(lane_of) if home == lane) for lane in lanes
    )


def limit_per_lane(memory_limit: Limit | None, lanes: int) -> tuple[float, ...]:
    """Return one limit per lane in bytes; infinite without a limit.

    >>> limit_per_lane(["1kB", 2000], 2)
    (1000.0, 2000.0)

    Raises:
        CostError: if a limit is not above zero, or there is neither one number nor one per lane.
    """
    if memory_limit is None:
        return (float("inf"),) * lanes
    try:
        given = np.asarray(_bytes(memory_limit), dtype=np.float64)
    except (TypeError, ValueError):
        fault = f"memory_limit: {memory_limit!r:.80} is not a number of bytes"
        raise CostError(f'{fault}; pass a number such as 16e9 or "16GiB", or a list with one per lane') from None
    if given.ndim > 1 or (given.ndim == 1 and len(given) != lanes):
        raise CostError(f"memory_limit must be one number, or one per lane; lanes: {lanes}, given: {memory_limit!r}")
    if not (given > 0).all():
        raise CostError(f"memory_limit: {memory_limit!r} must be above 0")
    return tuple(np.broadcast_to(given, lanes).tolist())


def _bytes(given: Any) -> Any:  # noqa: ANN401 - whatever the user gave
    """Convert texts to numbers; return everything else unchanged."""
    if isinstance(given, bool):
        raise TypeError(given)
    if isinstance(given, str):
        return parse_bytes(given)
    return [_bytes(item) for item in given] if isinstance(given, (list, tuple)) else given
