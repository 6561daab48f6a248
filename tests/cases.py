"""Cases that many tests share: every schedule that is registered, in many sizes."""

from __future__ import annotations

from functools import cache

import pytest

from penstock import schedules
from penstock.errors import ScheduleError

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (2, 8), (3, 2), (3, 7), (4, 4), (4, 9), (5, 3), (6, 13), (8, 8)]
NAMES = [name for name in schedules.names() if name != "auto"]
OPEN = [name for name in NAMES if "stages_per_lane" in schedules.describe(name).options]


def build_or_none(name, lanes, micro_batches, **options):
    """Build a schedule; None where its definition has no such counts (which must be said)."""
    try:
        return schedules.build(name, lanes=lanes, micro_batches=micro_batches, **options)
    except ScheduleError as error:
        if lanes % 2 and schedules.describe(name).doubles_weights and "must be even" in str(error):
            return None
        raise


@cache  # building them takes seconds
def every_schedule():
    """All schedules in all sizes, as parameters."""
    return [
        pytest.param(schedule, id=f"{name}-{lanes}x{mbs}")
        for name in NAMES
        for lanes, mbs in SIZES
        if (schedule := build_or_none(name, lanes, mbs)) is not None
    ]
