"""Text format: a schedule as readable lines, as the CSV of torch.distributed.pipelining, and as JSON.

One line is one lane. `2F0` is an action. `2F0@3` is an action that uses version 3 of the weights of its stage.
`(1F4;2B1)` are two neighbours that overlap; torch and the CSV write `(1F4;2B1)OVERLAP_F_B`.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.files import write_whole
from penstock.schedule.actions import Action, Ints, Kind, Lane, encode
from penstock.schedule.rules import Where, occupying
from penstock.schedule.schedule import Schedule

_OVERLAP = "OVERLAP_F_B"  # the name in torch
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)(?:" + _OVERLAP + r")?")
_MAX_CSV_BYTES = 1 << 30
_TORCH_ONLY = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_text(schedule: Schedule) -> str:
    """Return a schedule as text, one line per lane.

    >>> print(to_text(Schedule.of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])))
    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1
    """
    return "\n".join(" ".join(cells) for cells in _cells(schedule, closing=")"))


def write_csv(schedule: Schedule, path: str | PathLike[str]) -> None:
    """Write a CSV file that torch.distributed.pipelining loads as compute_only."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows(_cells(schedule, closing=f"){_OVERLAP}"))
    write_whole(path, text.getvalue())


def load_csv(path: str | PathLike[str]) -> Schedule:
    """Read a CSV file in the compute_only form of torch.distributed.pipelining; empty cells are idle steps.

    Raises:
        ScheduleError: if the file is not such a CSV file; the message names the line and the cell.
    """
    if not isinstance(path, (str, PathLike)):
        raise ScheduleError(f"pass the path of a CSV file; given: {path!r}")
    name = os.fspath(path)
    try:
        if not Path(name).is_file():
            Path(name).stat()  # raises if the path does not exist
            raise ScheduleError(f"{name}: cannot be read: it is not a file")
        if Path(name).stat().st_size > _MAX_CSV_BYTES:
            raise ScheduleError(f"{name}: is larger than 1 GiB, so it is not a schedule")
        text = Path(name).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{name}: is not text: byte {error.start} is not UTF-8") from None
    except ScheduleError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{name}: cannot be read: {reason}") from error
    try:
        rows: list[Sequence[str]] = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise ScheduleError(f"{name}: is not a CSV file: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return read_lanes(rows, name=Path(name).stem, source=name)


def read_lanes(lanes: Sequence[str | Sequence[str]], *, name: str = "schedule", source: str = "") -> Schedule:
    """Read lanes of texts; the lanes also determine where each stage lives."""
    parsed: list[list[Action]] = []
    versions: list[list[int]] = []
    overlaps: set[tuple[int, int]] = set()
    for number, lane in enumerate(lanes):
        actions: list[Action] = []
        used: list[int] = []
        cells = lane.split() if isinstance(lane, str) else lane
        for column, cell in enumerate(cells):
            if not cell.strip():
                continue
            try:
                found = list(_read_cell(cell.strip()))
            except ScheduleError as error:
                where = f"{source}: line {number + 1}, cell" if source else f"lane {number}, action"
                raise ScheduleError(f"{where} {column + 1}: {error}") from None
            if len(found) == 2:
                overlaps.add((number, len(actions)))
            for action, version in found:
                actions.append(action)
                used.append(version)
        parsed.append(actions)
        versions.append(used)
    if not any(parsed):
        raise ScheduleError(f"{source or 'the schedule'}: has no actions")
    return _place(parsed, versions, overlaps, name=name, source=source)


def _cells(schedule: Schedule, *, closing: str) -> Iterator[list[str]]:
    pairs: dict[int, set[int]] = {}
    for number, index in schedule.overlaps:
        pairs.setdefault(number, set()).add(index)
    for number, lane in enumerate(schedule.lanes):
        words = [str(action) for action in lane]
        if schedule.versions is not None:
            words = [
                f"{word}@{version}" for word, version in zip(words, schedule.versions[number].tolist(), strict=True)
            ]
        firsts = {index for index in pairs.get(number, ()) if index < len(words) - 1}
        cells = []
        for index, word in enumerate(words):
            if index in firsts:
                cells.append(f"({word};{words[index + 1]}{closing}")
            elif index - 1 not in firsts:
                cells.append(word)
        yield cells


def _read_cell(cell: str) -> Iterator[tuple[Action, int]]:
    pair = _PAIR.fullmatch(cell)
    for word in (pair[1], pair[2]) if pair else (cell,):
        text, _, version = word.partition("@")
        if version and not re.fullmatch("[0-9]{1,9}", version):
            raise ScheduleError(f"{word[:40]!r} must have a whole number (the version) after '@'")
        if _TORCH_ONLY.fullmatch(text):
            raise ScheduleError(f"{word[:40]!r} belongs to torch's lowered form: load the compute-only form")
        action = Action.parse(text)
        if action.kind not in occupying(Where.LANE) or action.kind is Kind.RECOMPUTE:
            raise ScheduleError(
                f"{word[:40]!r} is a transfer or a copy: a schedule has only compute actions, lowering adds the rest"
            )
        yield action, int(version or 0)


def _place(
    parsed: list[list[Action]], versions: list[list[int]], overlaps: set[tuple[int, int]], *, name: str, source: str
) -> Schedule:
    prefix = f"{source}: " if source else ""
    num_stages = _count({a.stage for lane in parsed for a in lane}, f"{prefix}stage")
    num_mbs = _count({a.mb for lane in parsed for a in lane}, f"{prefix}micro-batch")
    num_actions = sum(map(len, parsed))
    if num_stages * num_mbs > 4 * num_actions + 10_000:  # refuse before allocating arrays of this size
        raise ScheduleError(
            f"{prefix}lacks most of its actions; stages: {num_stages}, micro-batches: {num_mbs}, actions: {num_actions}"
        )
    ways, way_of = _ways(parsed, num_stages, num_mbs)
    lanes = tuple(Lane(np.array([int(encode(*action)) for action in lane], dtype=np.int64)) for lane in parsed)
    has_versions = any(action.kind is Kind.U for lane in parsed for action in lane) or any(map(any, versions))
    numbers = tuple(np.array(v, dtype=np.int32) for v in versions) if has_versions else None
    return Schedule(lanes, ways, num_mbs, way_of, frozenset(overlaps), numbers, name)


def _count(numbers: set[int], what: str) -> int:
    """Return how many numbers there are; they must start at 0 and have no gap."""
    if len(numbers) != max(numbers) + 1:
        gap = next(n for n in range(len(numbers) + 1) if n not in numbers)
        word = what.rsplit(maxsplit=1)[-1]
        raise ScheduleError(f"{what} {gap} has no action, but {word} {max(numbers)} has: number them without a gap")
    return len(numbers)


def _ways(
    parsed: list[list[Action]], num_stages: int, num_mbs: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Find the lane of each stage for each micro-batch; a stage that a micro-batch lacks is taken from the others."""
    home: Ints = np.full((num_mbs, num_stages), -1, dtype=np.int32)
    for lane, actions in reversed(list(enumerate(parsed))):
        for action in actions:
            if action.kind is Kind.F or home[action.mb, action.stage] < 0:
                home[action.mb, action.stage] = lane
    for stage in range(num_stages):
        known = home[:, stage][home[:, stage] >= 0]
        home[home[:, stage] < 0, stage] = known[0]
    ways, firsts, way_of = np.unique(home, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # the way of micro-batch 0 first
    rank = np.argsort(order)
    return tuple(tuple(way) for way in ways[order].tolist()), tuple(rank[way_of.ravel()].tolist())


# ---- JSON


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
