"""Step recording: the measured timeline of a step, from the spans of all lanes on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import UsageError
from penstock.planning.attribution import find_causes
from penstock.report.notebook import as_text
from penstock.report.timeline import Span, Timeline
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.runtime.step import Step
from penstock.schedule.actions import KIND_INDEX, Kind
from penstock.schedule.lower import Lowered
from penstock.schedule.schedule import Schedule

_RECEIVES = (KIND_INDEX[Kind.RECV_F], KIND_INDEX[Kind.RECV_B])
_SENDS = (KIND_INDEX[Kind.SEND_F], KIND_INDEX[Kind.SEND_B])


class Recording:
    """The recorded steps. It has all attributes of `Timeline`, such as `bubble` and `to_html`, for the last step.

    Attributes:
        timelines: the timelines of all recorded steps.
        measured_bytes: for each lane, the peak memory of saved and pending values in the last step; empty unless the
            recording measures memory.
    """

    def __init__(
        self, schedule: Schedule, bytes_of: Callable[[], dict[str, NDArray[np.float64]]], *, memory: bool = False
    ) -> None:
        self._schedule, self._bytes_of, self.measures_memory = schedule, bytes_of, memory
        self.measured_bytes: tuple[int, ...] = ()
        self._lowered: Lowered | None = None
        self._spans: list[Spans] = []
        self._is_whole = False
        self.timelines: list[Timeline] = []

    def begin(self, step: Step, lowered: Lowered, executors: Sequence[Executor]) -> list[Spans]:
        """Return one empty list per lane of this process, to which the lane adds its spans."""
        self._lowered, self._spans = lowered, [[] for _ in executors]
        for executor in executors:
            executor.streams.start_clock()
        # a step that omits actions does not follow the schedule, so its bubble has no causes
        self._is_whole = step.mode.has_backward and step.batch.num_mbs == self._schedule.num_mbs
        return self._spans

    def end(self, lane_group: LaneGroup, executors: Sequence[Executor]) -> None:
        """Gather the spans of all processes, and make the timeline of the step."""
        held = self._bytes_of()
        if self.measures_memory:
            held = self._measured(lane_group, executors)
        assert self._lowered is not None
        offset = lane_group.control.clock_offset()
        own = [
            [(place, start / 1e9 + offset, end / 1e9 + offset) for place, start, end in executor.settle(spans)]
            for executor, spans in zip(executors, self._spans, strict=True)
        ]
        everyone = [span for process in lane_group.control.gather(own) for lane in process for span in lane]
        self.timelines.append(_timeline(self._lowered, everyone, held, is_whole=self._is_whole))

    def _measured(self, lane_group: LaneGroup, executors: Sequence[Executor]) -> dict[str, NDArray[np.float64]]:
        """Return the measured bytes of each stage for one micro-batch; store the peak of each lane."""
        peaks = [max(executor.held_bytes, default=0) for executor in executors]
        stages = [[value, stage, size] for e in executors for (value, stage), size in e.stage_bytes.items()]
        everyone = lane_group.control.gather([peaks, stages])
        self.measured_bytes = tuple(peak for own, _ in everyone for peak in own)
        held = {f"{value}_bytes": np.zeros(self._schedule.num_stages) for value in ("saved", "pending", "input")}
        for value, stage, size in (row for _, rows in everyone for row in rows):
            column = held[f"{value}_bytes"]
            column[stage] = max(column[stage], size)
        return held

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last recorded step.

        Raises:
            UsageError: if no step was recorded.
        """
        if not self.timelines:
            raise UsageError("nothing was recorded: run a step inside `with pipe.record() as timeline:`")
        return self.timelines[-1]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute of a timeline
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.timeline, name)

    def __len__(self) -> int:
        return len(self.timeline)

    def __iter__(self) -> Iterator[Span]:
        return iter(self.timeline)

    def _repr_html_(self) -> str:
        """Return the page of the last recorded step for the output of a cell in a notebook."""
        return self.timelines[-1]._repr_html_() if self.timelines else as_text(repr(self))

    def __repr__(self) -> str:
        return f"Recording({self.timelines[-1]!r})" if self.timelines else "Recording(nothing yet)"


def _timeline(
    lowered: Lowered, spans: Sequence[Sequence[float]], held: dict[str, NDArray[np.float64]], *, is_whole: bool
) -> Timeline:
    rows, schedule = lowered.rows, lowered.schedule
    table = np.array(spans, dtype=np.float64).reshape(-1, 3)
    place = table[:, 0].astype(np.int64)
    first = table[:, 1].min() if len(table) else 0.0
    start, end = table[:, 1] - first, table[:, 2] - first
    kind = rows.kind[place]
    is_send = np.isin(kind, _SENDS)
    # a send ends when its waiting receiver gets the value; if the receiver did not wait, the end is unknown (NaN). The
    # receiver's clock may be slightly behind, so the end is never before the start
    arrivals = _arrivals(lowered, place, start, end, np.isin(kind, _RECEIVES))
    end = np.where(is_send, np.maximum(arrivals, start), end)
    to_lane = np.full(len(place), -1, dtype=np.int32)
    sends = np.flatnonzero(is_send)
    to_lane[sends] = schedule.home_table[rows.peer[place[sends]], schedule.way_table[rows.mb[place[sends]]]]
    timeline = Timeline(
        name=schedule.name,
        num_lanes=schedule.num_lanes,
        kind=kind,
        stage=rows.stage[place],
        mb=rows.mb[place],
        lane=rows.lane[place],
        to_lane=to_lane,
        start=start,
        end=end,
        place=place.astype(np.int32),
        is_measured=True,
        saved_bytes=held["saved_bytes"],
        pending_bytes=held["pending_bytes"],
        input_bytes=held["input_bytes"],
    )
    return replace(timeline, causes=find_causes(timeline, lowered)) if is_whole else timeline


def _arrivals(
    lowered: Lowered, place: NDArray[np.int64], start: NDArray[np.float64], end: NDArray[np.float64],
    is_receive: NDArray[np.bool_],
) -> NDArray[np.float64]:  # fmt: skip
    """Return for each send the time at which its waiting receiver got the value; NaN if the receiver did not wait."""
    waited = is_receive & (end - start > 1e-4)
    at_send = np.full(len(lowered.rows), np.nan)
    at_send[lowered.flow.needs[place[waited], 0]] = end[waited]
    return at_send[place]
