"""Chrome trace: write a timeline for Perfetto, chrome://tracing and Holistic Trace Analysis."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np

from penstock.files import write_whole
from penstock.report.timeline import Timeline
from penstock.schedule.actions import Ints
from penstock.schedule.rules import RULES, Where

Event = dict[str, Any]

# the threads of the process of a lane: its compute, and overlapping compute, since slices of one thread must be nested
_COMPUTE, _BESIDE = 0, 1


def write_chrome(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write a Chrome trace; it is compressed if the path ends in .gz."""
    events = ",\n".join(json.dumps(event) for event in trace_events(timeline))
    # HTA searches for the rank with a space after the colon, as json.dumps writes it
    head = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceName": timeline.name})[:-1]
    text = f'{head}, "traceEvents": [\n{events}\n]}}\n'
    is_packed = str(path).endswith(".gz")
    write_whole(path, gzip.compress(text.encode(), mtime=0) if is_packed else text)


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """Yield the events of a trace: one process per lane, with its compute, transfers and memory."""
    for lane in range(timeline.num_lanes):
        yield {"ph": "M", "name": "process_name", "pid": lane, "args": {"name": f"lane {lane}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": lane, "args": {"sort_index": lane}}
        yield {"ph": "M", "name": "thread_name", "pid": lane, "tid": _COMPUTE, "args": {"name": "compute"}}
    begin = float(timeline.start.min())
    thread = _threads(timeline)
    for lane in sorted(set(timeline.lane[thread == _BESIDE].tolist())):
        yield {"ph": "M", "name": "thread_name", "pid": lane, "tid": _BESIDE, "args": {"name": "compute beside"}}
    for number, span in enumerate(timeline):
        common = {
            "name": str(span.action),
            "cat": span.action.kind.words,
            "pid": span.lane,
            "args": {"action": str(span.action), "stage": span.action.stage, "micro-batch": span.action.mb},
        }
        start, end = (1e6 * (moment - begin) for moment in (float(timeline.apart[number]), span.end))
        if RULES[span.action.kind].where is Where.LANE:
            yield {**common, "ph": "X", "tid": int(thread[number]), "ts": start, "dur": end - start}
        else:
            yield from _transfer_events(common, number, span.to_lane, start, end)
    yield from _memory_events(timeline, begin)


def _threads(timeline: Timeline) -> Ints:
    """Return the thread of each span: compute, or beside it if the span overlaps another one without nesting."""
    thread = np.full(len(timeline), _COMPUTE, dtype=np.int32)
    for own in timeline.compute:
        reach = np.concatenate([own.start[:1], own.end[:-1]])
        juts_out = (timeline.apart[own.at] < reach) & (timeline.known_end[own.at] > reach)
        thread[own.at[juts_out]] = _BESIDE
    return thread


def _transfer_events(common: dict[str, Any], number: int, to_lane: int, start: float, end: float) -> Iterator[Event]:
    """Yield a transfer as events of its own track, since several run at the same time, and as an arrow."""
    # Perfetto draws one track per name, so use the kind; a local id keeps the track inside the lane
    own = {"name": common["cat"], "id2": {"local": f"{number:#x}"}}
    if math.isnan(end):  # the arrival is unknown: mark the start
        yield {**common, **own, "ph": "n", "ts": start}
        return
    yield {**common, **own, "ph": "b", "ts": start}
    yield {**common, **own, "ph": "e", "ts": end}
    if to_lane >= 0:  # from the action that made the value to the next action of the receiving lane
        arrow = {"cat": "transfer", "name": common["name"], "id": number, "tid": _COMPUTE}
        yield {**arrow, "ph": "s", "pid": common["pid"], "ts": max(0.0, start - 1e-3)}
        yield {**arrow, "ph": "f", "pid": to_lane, "ts": end}


def _memory_events(timeline: Timeline, begin: float) -> Iterator[Event]:
    in_bytes = max(timeline.peak_bytes) > 0
    unit = "bytes" if in_bytes else "stage micro-batches"
    for lane, memory in enumerate(timeline.memory):
        values = memory.held_bytes if in_bytes else memory.held
        last = np.flatnonzero(np.diff(memory.seconds, append=np.inf))  # the last value of each moment
        for moment, value in zip(memory.seconds[last].tolist(), values[last].tolist(), strict=True):
            yield {"ph": "C", "name": "held", "pid": lane, "ts": 1e6 * (moment - begin), "args": {unit: value}}
