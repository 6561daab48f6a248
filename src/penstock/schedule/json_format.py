"""JSON format: convert a schedule to plain numbers and texts, and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.schedule.schedule import Schedule


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Return all fields of a schedule as plain data.

    >>> from penstock.schedule.builders.gpipe import gpipe
    >>> from_json(to_json(gpipe(lanes=2, micro_batches=2))) == gpipe(lanes=2, micro_batches=2)
    True
    """
    return {
        "name": schedule.name,
        "lanes": [str(lane) for lane in schedule.lanes],
        "ways": [list(way) for way in schedule.ways],
        "num_mbs": schedule.num_mbs,
        "way_of": list(schedule.way_of),
        "overlaps": sorted(map(list, schedule.overlaps)),
        "versions": None if schedule.versions is None else [used.tolist() for used in schedule.versions],
    }


def from_json(plain: dict[str, Any]) -> Schedule:
    """Return the schedule that `to_json` wrote."""
    versions = plain["versions"]
    return Schedule(
        lanes=tuple(plain["lanes"]),
        ways=tuple(tuple(way) for way in plain["ways"]),
        num_mbs=plain["num_mbs"],
        way_of=tuple(plain["way_of"]),
        overlaps=frozenset((lane, at) for lane, at in plain["overlaps"]),
        versions=None if versions is None else tuple(np.array(used, dtype=np.int32) for used in versions),
        name=plain["name"],
    )
