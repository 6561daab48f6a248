"""Weight versions: check the versions that the actions of an asynchronous schedule use, and count them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.schedule.actions import KIND_INDEX, Codes, Ints, Kind, decode
from penstock.schedule.schedule import Schedule


def find_version_faults(schedule: Schedule) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, index, message) for each action with an invalid version.

    Version 0 exists at the start, and the n-th update of a stage makes version n. A forward may use any version
    that was made before it. A backward must use the version of its forward.
    """
    used_by_forward: dict[tuple[int, int], int] = {}
    for number, lane in enumerate(schedule.lanes):
        newest: dict[int, int] = {}
        unused: dict[int, int] = {}  # for each stage, the index of the newest gradient that no update has used
        for index, action in enumerate(lane):
            version = schedule.version(number, index)
            key = (action.stage, action.mb)
            if action.kind in (Kind.B, Kind.W):
                unused[action.stage] = index
            if action.kind is Kind.U:
                unused.pop(action.stage, None)
                newest[action.stage] = newest.get(action.stage, 0) + 1
                if version != newest[action.stage]:
                    yield (
                        number,
                        index,
                        f"{action} makes version {newest[action.stage]} of stage {action.stage}, not {version}",
                    )
            elif action.kind is Kind.F:
                used_by_forward[key] = version
                newest_here = newest.get(action.stage, 0)
                if not 0 <= version <= newest_here:
                    yield (
                        number,
                        index,
                        f"{action} uses version {version}, but the newest of its stage is {newest_here}",
                    )
            elif key in used_by_forward and version != used_by_forward[key]:
                yield number, index, f"{action} uses version {version}, but its forward used {used_by_forward[key]}"
        for stage, index in unused.items():
            yield number, index, f"{lane[index]} makes a gradient that no update of stage {stage} uses"


def stashed_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the maximum number of weight versions that each lane holds at once.

    A version is held from the update that makes it until the last forward that uses it, and the backwards of these
    forwards, have run.
    """
    if schedule.versions is None:
        return (1,) * schedule.num_lanes
    return tuple(_most_alive(lane.codes, used) for lane, used in zip(schedule.lanes, schedule.versions, strict=True))


def _most_alive(codes: Codes, used: Ints) -> int:
    """Count the versions of one lane: each lives from the update that makes it to its last use."""
    kind, stage, _ = decode(codes)
    events = np.zeros(len(codes) + 1, dtype=np.int64)
    for here in np.unique(stage):
        of_stage = np.flatnonzero(stage == here)
        is_update = kind[of_stage] == KIND_INDEX[Kind.U]
        made_at = np.concatenate([[0], of_stage[is_update]])
        last_use = made_at.copy()
        np.maximum.at(last_use, used[of_stage][~is_update], of_stage[~is_update])
        np.add.at(events, made_at, 1)
        np.add.at(events, last_use + 1, -1)
    return int(np.cumsum(events).max())
