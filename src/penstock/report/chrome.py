"""Chrome: a timeline as a Chrome trace, for Perfetto, chrome://tracing and Holistic Trace Analysis."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np

from penstock.files import write_whole
from penstock.report.timeline import Timeline
from penstock.schedule.rules import RULES, Where

__all__ = ["trace_events", "write_chrome"]

_COMPUTE, _TRANSFERS = 0, 1  # threads of a lane's process


def write_chrome(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Write a Chrome trace; a path that ends in .gz is compressed."""
    events = ",\n".join(json.dumps(event) for event in trace_events(timeline))
    # HTA looks for the rank with a space behind the colon, as json.dumps writes it
    head = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceName": timeline.name})[:-1]
    text = f'{head}, "traceEvents": [\n{events}\n]}}\n'
    is_packed = str(path).endswith(".gz")
    write_whole(path, gzip.compress(text.encode(), mtime=0) if is_packed else text)


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace: a process a lane, its compute and its transfers as threads, and its memory."""
    for lane in range(timeline.num_lanes):
        yield {"ph": "M", "name": "process_name", "pid": lane, "args": {"name": f"lane {lane}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": lane, "args": {"sort_index": lane}}
        for thread, name in ((_COMPUTE, "compute"), (_TRANSFERS, "transfers")):
            yield {"ph": "M", "name": "thread_name", "pid": lane, "tid": thread, "args": {"name": name}}
    begin = float(timeline.start.min())
    for number, span in enumerate(timeline):
        is_compute = RULES[span.action.kind].where is Where.LANE
        thread = _COMPUTE if is_compute else _TRANSFERS
        start, end = (1e6 * (moment - begin) for moment in (span.start, span.end))
        yield {
            "ph": "X",
            "name": str(span.action),
            "cat": span.action.kind.words,
            "pid": span.lane,
            "tid": thread,
            "ts": start,
            "dur": end - start,
            "args": {"stage": span.action.stage, "micro-batch": span.action.mb},
        }
        if span.to_lane >= 0:  # an arrow from the send to the lane where the value arrives
            arrow = {"cat": "transfer", "name": str(span.action), "id": number}
            yield {**arrow, "ph": "s", "pid": span.lane, "tid": thread, "ts": start}
            yield {**arrow, "ph": "f", "bp": "e", "pid": span.to_lane, "tid": _COMPUTE, "ts": end}
    yield from _memory_events(timeline, begin)


def _memory_events(timeline: Timeline, begin: float) -> Iterator[dict[str, Any]]:
    in_bytes = max(timeline.peak_bytes) > 0
    name = "held bytes" if in_bytes else "held stage micro-batches"
    for lane, memory in enumerate(timeline.memory):
        values = memory.held_bytes if in_bytes else memory.held
        last = np.flatnonzero(np.diff(memory.seconds, append=np.inf))  # the last value of each moment
        for moment, value in zip(memory.seconds[last].tolist(), values[last].tolist(), strict=True):
            yield {"ph": "C", "name": name, "pid": lane, "ts": 1e6 * (moment - begin), "args": {name: value}}
