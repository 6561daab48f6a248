"""Counts: check the numbers of lanes, stages and micro-batches; place stages on lanes."""

from __future__ import annotations

from numbers import Integral

from penstock.errors import ScheduleError


def check_count(name: str, value: object, most: int) -> int:
    """Return a whole number of at least 1 and below `most`; refuse anything else."""
    count = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else 0
    if count < 1:
        raise ScheduleError(f"{name}: {value!r} must be a whole number, 1 or more")
    if count >= most:
        raise ScheduleError(f"{name}: {count} is too many; use less than {most}")
    return count


def need_even_lanes(name: str, lanes: int) -> None:
    """Refuse an odd number of lanes, and name the nearest even numbers."""
    if lanes % 2:
        options = f"{lanes - 1} or {lanes + 1}" if lanes > 1 else "2"
        raise ScheduleError(
            f"{name} is bidirectional, so its number of lanes must be even; lanes: {lanes}, use {options}"
        )


def loop(lanes: int, stages_per_lane: int) -> tuple[int, ...]:
    """Return the lane of each stage when stages go round the lanes: 0 1 2 0 1 2."""
    return tuple(stage % lanes for stage in range(lanes * stages_per_lane))


def snake(lanes: int, stages_per_lane: int) -> tuple[int, ...]:
    """Return the lane of each stage when stages go back and forth over the lanes: 0 1 2 2 1 0."""
    there = tuple(range(lanes))
    return tuple(lane for turn in range(stages_per_lane) for lane in (there[::-1] if turn % 2 else there))
