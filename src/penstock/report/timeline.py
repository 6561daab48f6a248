"""Timeline: all spans of a step, simulated or measured, and the figures derived from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.bubble_causes import Causes
from penstock.schedule.actions import KIND_INDEX, KINDS, Action, Floats, Ints, Kind, Positions
from penstock.schedule.peak_memory import HELD, changes_of
from penstock.schedule.rules import RULES, Where

_TOUCH = 0.1  # two actions overlap if they share more than this part of the shorter one; less comes from clocks


class Span(NamedTuple):
    """One action with its start and end (NaN: unknown); `to_lane` is the target of a transfer, otherwise -1."""

    action: Action
    lane: int
    to_lane: int
    start: float
    end: float


@dataclass(frozen=True)
class Memory:
    """The memory of a lane over time: the bytes and the number of stage micro-batches from each moment on."""

    seconds: Floats
    held_bytes: Floats
    held: Ints


class Stretches(NamedTuple):
    """The compute of a lane, ordered by time: positions of spans, and their starts and ends without overlaps."""

    at: Positions
    start: Floats
    end: Floats


_MOST_SPANS_OF_A_CELL = 100_000  # a notebook stores the page of each output


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The spans of one step as columns, with the bytes that its stages hold.

    All times use one clock. In a measured timeline, a send starts when it is issued and ends when its value arrives
    (NaN: unknown). A receive lasts as long as its lane waits for it. Neighbours may overlap slightly.

    The bubble is the share of time without compute. There are two: `bubble` is a share of the makespan of the step;
    `span_bubble` is a share of the longest lane span (from the first start of a lane to its last end).
    """

    name: str
    num_lanes: int
    kind: NDArray[np.int8]
    stage: Ints
    mb: Ints
    lane: Ints
    to_lane: Ints
    start: Floats
    end: Floats
    saved_bytes: Floats
    pending_bytes: Floats
    input_bytes: Floats
    place: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # positions in the lowered lanes, if known
    is_measured: bool = False
    causes: Causes | None = None  # of the bubble, if computed

    def __len__(self) -> int:
        return len(self.start)

    def __repr__(self) -> str:
        return f"Timeline({self.name!r}, {self.num_lanes} lanes, {len(self)} spans)"

    def _repr_html_(self) -> str:
        """Return the page for the output of a cell in a notebook; of a very long timeline, its name only."""
        from penstock.report.notebook import as_text, in_frame
        from penstock.report.timeline_page import page_of

        if not 0 < len(self) <= _MOST_SPANS_OF_A_CELL:
            return as_text(repr(self))
        return in_frame(page_of([self]), height=min(360 + 40 * self.num_lanes, 900))

    def __iter__(self) -> Iterator[Span]:
        columns = (self.kind, self.stage, self.mb, self.lane, self.to_lane, self.start, self.end)
        for kind, stage, mb, lane, to_lane, start, end in zip(*(column.tolist() for column in columns), strict=True):
            yield Span(Action(KINDS[kind], stage, mb), lane, to_lane, start, end)

    @property
    def step_seconds(self) -> float:
        """The makespan: from the first start to the last end."""
        return float(self.known_end.max() - self.start.min())

    @cached_property
    def known_end(self) -> Floats:
        """The ends of the spans; an unknown end is replaced by the start."""
        return np.where(np.isnan(self.end), self.start, self.end)

    @cached_property
    def lane_seconds(self) -> tuple[float, ...]:
        """The span of each lane: from the start of its first compute to the end of its last."""
        return tuple(float(own.end[-1] - own.start[0]) if len(own.at) else 0.0 for own in self.compute)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """The compute time of each lane; overlapping actions count once."""
        return tuple(float((own.end - own.start).sum()) for own in self.compute)

    @cached_property
    def compute(self) -> tuple[Stretches, ...]:
        """The compute of each lane; of two overlapping actions, the later starts at the end of the earlier."""
        on_lane = _flags(Where.LANE)[self.kind]
        stretches = []
        for unsorted in self._by_lane(np.flatnonzero(on_lane)):
            at = unsorted[np.argsort(self.start[unsorted], kind="stable")]
            starts, ends = self.start[at], np.maximum.accumulate(self.known_end[at])
            if len(starts):
                starts = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
            stretches.append(Stretches(at, starts, ends))
        return tuple(stretches)

    @cached_property
    def apart(self) -> Floats:
        """The starts of the spans; an action that slightly overlaps the one before starts at the end of that one."""
        starts = self.start.copy()
        for own in self.compute:
            seconds = self.known_end[own.at] - self.start[own.at]
            shorter = np.minimum(seconds, np.concatenate([seconds[:1], seconds[:-1]]))
            touches = own.start - self.start[own.at] <= _TOUCH * shorter
            starts[own.at[touches]] = own.start[touches]
        return starts

    @property
    def bubble(self) -> float:
        """The share of lanes × makespan without compute."""
        return self._bubble(self.step_seconds)

    @property
    def span_bubble(self) -> float:
        """The share of lanes × longest lane span without compute."""
        return self._bubble(max(self.lane_seconds))

    @cached_property
    def lane_bubbles(self) -> tuple[float, ...]:
        """The share of the makespan without compute, for each lane."""
        step = self.step_seconds
        return tuple(1 - busy / step if step else 0.0 for busy in self.busy_seconds)

    @cached_property
    def peak_saved(self) -> tuple[int, ...]:
        """The maximum number of stage micro-batches that each lane holds, from forward to (input-gradient) backward."""
        return tuple(int(memory.held.max(initial=0)) for memory in self.memory)

    @property
    def peak_micro_batches(self) -> float:
        """The maximum that a lane holds, in micro-batches of 1/lanes of the model, for any number of stages."""
        return max(self.peak_saved) * self.num_lanes / len(self.saved_bytes)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The peak bytes of the saved and pending values of each lane."""
        return tuple(float(memory.held_bytes.max(initial=0.0)) for memory in self.memory)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """The memory of each lane over time."""
        return tuple(self._memory_of(lane) for lane in range(self.num_lanes))

    def to_text(self, *, width: int | None = None, color: bool | None = None) -> str:
        """Draw the lanes as text; by default coloured if stdout is a terminal."""
        from penstock.report.terminal_chart import draw_text

        return draw_text(self, width=width, color=color)

    def to_chrome(self, path: str | PathLike[str]) -> None:
        """Write a Chrome trace for Perfetto or chrome://tracing."""
        from penstock.report.chrome_trace import write_chrome

        write_chrome(self, path)

    def to_html(self, path: str | PathLike[str], *, compare: Timeline | None = None) -> None:
        """Write a self-contained page with this timeline; `compare` is drawn below it on the same time scale."""
        from penstock.report.timeline_page import write_html

        write_html([self] if compare is None else [self, compare], path)

    def _bubble(self, span: float) -> float:
        return 1 - sum(self.busy_seconds) / (self.num_lanes * span) if span else 0.0

    def _by_lane(self, at: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        at = at[np.argsort(self.lane[at], kind="stable")]
        return np.split(at, np.searchsorted(self.lane[at], np.arange(1, self.num_lanes)))

    def _memory_of(self, lane: int) -> Memory:
        """Apply the rule table to the actions of one lane, ordered by time.

        At equal times, memory is freed first: copies to the host end before compute starts. The actions of the lane
        keep their order.
        """
        at = self._holding[lane]
        out, back = (at[self.kind[at] == KIND_INDEX[kind]] for kind in (Kind.OFFLOAD, Kind.FETCH))
        own = at[_flags(Where.LANE)[self.kind[at]]]
        own = own[np.argsort(self.start[own], kind="stable")]
        inner = np.stack([self.apart[own], self.known_end[own]], axis=1).ravel()
        when = np.concatenate([self.known_end[out], inner, self.start[back]])
        order = np.argsort(when, kind="stable")
        if len(out) and len(self.place):
            order = np.lexsort((*self._ranks(out, own, back), when))

        def curve(at_start: Floats, at_end: Floats) -> Floats:
            lane_changes = np.stack([at_start[own], at_end[own]], axis=1).ravel()
            changes = np.concatenate([at_end[out], lane_changes, at_start[back]])
            return np.cumsum(changes[order])

        held_bytes, held = curve(*self._byte_changes), np.rint(curve(*self._count_changes)).astype(np.int32)
        changed = (np.diff(held_bytes, prepend=0.0) != 0) | (np.diff(held, prepend=0) != 0)
        return Memory(when[order][changed], held_bytes[changed], held[changed])

    def _ranks(self, out: Positions, own: Positions, back: Positions) -> tuple[Ints, Ints]:
        """Return the order of events at equal times: ends, then actions that take no time, then starts."""
        takes_time = self.known_end > self.start
        ends = np.where(takes_time, 0, 1)
        starts = np.where(takes_time, 2, 1)
        group = np.concatenate([ends[out], np.stack([starts[own], ends[own]], axis=1).ravel(), starts[back]])
        own_places = (2 * self.place[own][:, None] + np.arange(2)).ravel()
        place = np.concatenate([2 * self.place[out] + 1, own_places, 2 * self.place[back]])
        return place.astype(np.int32), group.astype(np.int32)

    @cached_property
    def _holding(self) -> list[NDArray[np.int64]]:
        touches = np.array([bool({*r.makes, *r.remakes, *r.frees} & HELD) for r in (RULES[kind] for kind in KINDS)])
        return self._by_lane(np.flatnonzero(touches[self.kind]))

    @cached_property
    def _byte_changes(self) -> tuple[Floats, Floats]:
        return self._changes(self.saved_bytes, self.pending_bytes, self.input_bytes)

    @cached_property
    def _count_changes(self) -> tuple[Floats, Floats]:
        ones = np.ones_like(self.saved_bytes)
        return self._changes(ones, 0 * ones, 0 * ones)

    def _changes(self, saved: Floats, pending: Floats, kept_input: Floats) -> tuple[Floats, Floats]:
        return changes_of(self.kind, self.stage, self.mb, saved=saved, pending=pending, kept_input=kept_input)


def _flags(where: Where) -> NDArray[np.bool_]:
    return np.array([RULES[kind].where is where for kind in KINDS], dtype=np.bool_)
