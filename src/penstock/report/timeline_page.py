"""Timeline page: a self-contained HTML page of timelines that zooms, pans and compares."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.files import write_whole
from penstock.report.bubble_causes import CAUSES, SIGNS, Causes, Figure
from penstock.report.page_assembly import Json, assemble
from penstock.report.timeline import Memory, Timeline
from penstock.schedule.actions import KINDS, Floats
from penstock.schedule.rules import RULES, Where

# The files of the script, in the order of their dependencies.
_SCRIPTS = (
    "format",
    "dom",
    "data",
    "view",
    "palette",
    "gestures",
    "lanes",
    "curves",
    "causes",
    "difference",
    "build",
    "interact",
    "main",
)

# Times are stored as integers from 0 (start of the step) to this (end): four bytes, finer than a page can show.
_LAST_TICK = (1 << 32) - 1


def write_html(timelines: Sequence[Timeline], path: str | PathLike[str]) -> None:
    """Write one page with all timelines below each other, on one time axis.

    Raises:
        UsageError: if there is nothing to draw.
        OutputError: if the file cannot be written.
    """
    if not timelines or not all(isinstance(timeline, Timeline) for timeline in timelines):
        raise UsageError("a page needs a list of timelines, at least one")
    if empty := [timeline.name for timeline in timelines if not len(timeline)]:
        raise UsageError(f"nothing to draw: no spans in {', '.join(empty)}")
    write_whole(path, page_of(timelines))


def page_of(timelines: Sequence[Timeline]) -> str:
    """Return the page as text."""
    names = list(_distinct(_labelled(timelines)))
    data = {
        "causes": [figure._asdict() for figure in CAUSES],
        "signs": [figure._asdict() for figure in SIGNS],
        "kinds": [{"text": kind.value, "words": kind.words, "where": RULES[kind].where.name} for kind in KINDS],
        "timelines": [_packed(timeline, name) for timeline, name in zip(timelines, names, strict=True)],
    }
    title = " · ".join([*names, "Penstock timeline"])
    return assemble("page.html", title=title, styles=["page.css"], scripts=_SCRIPTS, data=data)


def _labelled(timelines: Sequence[Timeline]) -> list[str]:
    """Return the names of timelines; if one of them is measured, add "measured" or "predicted" to each."""
    if not any(timeline.is_measured for timeline in timelines):
        return [timeline.name for timeline in timelines]
    return [f"{timeline.name}, {'measured' if timeline.is_measured else 'predicted'}" for timeline in timelines]


def _distinct(names: Sequence[str]) -> Iterator[str]:
    """Number repeated names, so that a comparison can tell them apart."""
    total, seen = Counter(names), Counter[str]()
    for name in names:
        seen[name] += 1
        yield f"{name} ({seen[name]})" if total[name] > 1 else name


def _packed(timeline: Timeline, name: str) -> Json:
    return {
        "name": name,
        "isMeasured": timeline.is_measured,
        "causes": timeline.causes and _shares(timeline.causes),
        "numLanes": timeline.num_lanes,
        "stepSeconds": timeline.step_seconds,
        "bubble": timeline.bubble,
        "spanBubble": timeline.span_bubble,
        "laneBubbles": timeline.lane_bubbles,
        "peakSaved": timeline.peak_saved,
        "peakBytes": timeline.peak_bytes,
        "spans": _spans(timeline),
        "memory": _memory(timeline),
    }


def _shares(causes: Causes) -> Json:
    """Return the shares of a step and of its lanes, by the names of their fields."""

    def of(part: Causes, figures: Iterable[Figure]) -> dict[str, float]:
        return {figure.field: getattr(part, figure.field) for figure in figures}

    return {**of(causes, CAUSES), "lanes": [of(lane, (*CAUSES, *SIGNS)) for lane in causes.per_lane]}


def _spans(timeline: Timeline) -> Json:
    """Return the spans as columns, sorted by lane, row (compute, then one strip per kind) and start."""
    row_of = np.array([0 if RULES[kind].where is Where.LANE else 1 + index for index, kind in enumerate(KINDS)])
    shown = _takes_time(timeline)[timeline.kind]
    row = row_of[timeline.kind]
    order = np.lexsort((timeline.start, row, timeline.lane))
    order = order[shown[order]]
    first, last = _ticks(timeline, timeline.start[order]), _ticks(timeline, timeline.known_end[order])
    return {
        "laneEnds": _ends(timeline.lane[order], timeline.num_lanes),
        "start": _column(first),
        "ticks": _column(last - first),
        "kind": _column(timeline.kind[order]),
        "stage": _column(timeline.stage[order]),
        "mb": _column(timeline.mb[order]),
        "toLane": _column(timeline.to_lane[order] + 1),  # 0: to no lane
    }


def _takes_time(timeline: Timeline) -> NDArray[np.bool_]:
    """Return which kinds to draw: all compute, and transfers that take time."""
    longest = np.zeros(len(KINDS))
    np.maximum.at(longest, timeline.kind, timeline.known_end - timeline.start)
    is_compute = np.array([RULES[kind].where is Where.LANE for kind in KINDS])
    return np.asarray(is_compute | (longest > 0))


def _memory(timeline: Timeline) -> Json:
    """Return what each lane holds over time: bytes, or stage micro-batches if bytes are unknown."""
    in_bytes = max(timeline.peak_bytes) > 0
    curves = [_changes(memory, memory.held_bytes if in_bytes else memory.held) for memory in timeline.memory]
    lane = np.repeat(np.arange(timeline.num_lanes), [len(seconds) for seconds, _ in curves])
    return {
        "unit": "bytes" if in_bytes else "held",
        "laneEnds": _ends(lane, timeline.num_lanes),
        "start": _column(_ticks(timeline, np.concatenate([seconds for seconds, _ in curves]))),
        "value": _column(np.concatenate([values for _, values in curves]).astype(np.float32)),
    }


def _changes(memory: Memory, values: NDArray[np.float64] | NDArray[np.int32]) -> tuple[Floats, Floats]:
    """Keep only moments at which the value changes; of equal moments, keep the last."""
    is_last = np.append(np.diff(memory.seconds) > 0, True)[: len(values)]
    seconds, held = memory.seconds[is_last], values[is_last].astype(np.float64)
    is_change = np.diff(held, prepend=0.0) != 0
    return seconds[is_change], held[is_change]


def _ticks(timeline: Timeline, seconds: Floats) -> NDArray[np.int64]:
    step = timeline.step_seconds
    share = (seconds - timeline.start.min()) / step if step else np.zeros_like(seconds)
    return np.rint(np.clip(share, 0.0, 1.0) * _LAST_TICK).astype(np.int64)


def _ends(lane: NDArray[np.integer], num_lanes: int) -> Json:
    """Return where the rows of each lane end, for rows sorted by lane."""
    return _column(np.cumsum(np.bincount(lane, minlength=num_lanes)))


def _column(values: NDArray[np.integer] | NDArray[np.float32]) -> Json:
    """Pack numbers as base64 of little-endian bytes; integers use the smallest width that fits all of them."""
    kind = "f4" if values.dtype.kind == "f" else _smallest(int(values.max(initial=0)))
    return {"type": kind, "base64": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}


def _smallest(largest: int) -> str:
    widths: Iterable[int] = (1, 2, 4)
    return next(f"u{width}" for width in widths if largest < 1 << 8 * width)
