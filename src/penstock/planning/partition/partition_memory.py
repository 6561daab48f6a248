"""Partition memory: the memory of lanes: parameters with their state, and the saved values in flight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import cast

import numpy as np

from penstock.model.profile import Profile
from penstock.schedule.actions import Floats, Positions
from penstock.schedule.flow import Rows
from penstock.schedule.keep_policies import POLICIES, Keep
from penstock.schedule.lower import lower
from penstock.schedule.peak_memory import changes_of
from penstock.schedule.schedule import Schedule

Span = tuple[int, int]  # of a stage: its first and last position
_MEETS = 1 + 1e-9  # rounding: a limit that is met exactly is not exceeded, as in schedule.peak_memory
_MOST_TABLE = 1 << 24  # entries of the table of ties: 128 MiB


@dataclass(frozen=True, eq=False)
class Holding:
    """The number of micro-batches that a lane holds of each of its stages, at all moments that can be its peak."""

    stages: tuple[int, ...]  # the stages of the lane
    counts: Floats  # [moments, (saved, pending, input), stages]; moments that another one dominates are left out


def holdings_of(schedule: Schedule, keep: str) -> tuple[Holding, ...]:
    """Return what each lane holds, counted in the order of its actions by the rules of `schedule.peak_memory`."""
    rows = lower(schedule, keep=cast("Keep", keep)).rows if POLICIES[keep].recomputes else Rows.of(schedule)
    one, none = np.ones(schedule.num_stages), np.zeros(schedule.num_stages)
    steps = [
        changes_of(rows.kind, rows.stage, rows.mb, saved=saved, pending=pending, kept_input=kept)
        for saved, pending, kept in ((one, none, none), (none, one, none), (none, none, one))
    ]
    return tuple(_holding(rows, lane, schedule.stages_of(lane), steps) for lane in range(schedule.num_lanes))


def _holding(rows: Rows, lane: int, stages: tuple[int, ...], steps: list[tuple[Floats, Floats]]) -> Holding:
    here = slice(*rows.starts[lane : lane + 2].tolist())
    kind, stage = rows.kind[here], rows.stage[here]
    is_of = stage[:, None] == np.array(stages, dtype=np.int64)
    columns = []
    for at_start, at_end in steps:
        begun = np.cumsum(at_start[here][:, None] * is_of, axis=0)
        ended = np.cumsum(at_end[here][:, None] * is_of, axis=0)
        columns.append(begun + np.concatenate([np.zeros((1, len(stages))), ended[:-1]]) if len(kind) else begun)
    moments = np.stack(columns, axis=1).reshape(len(kind), -1)
    return Holding(stages, _fullest(moments).reshape(-1, 3, len(stages)))


def _fullest(moments: Floats) -> Floats:
    """Return the rows that no other row dominates, without duplicates."""
    left = moments[np.argsort(-moments.sum(axis=1), kind="stable")]
    found = [np.zeros(moments.shape[1])] if not len(left) else []
    while len(left):
        found.append(left[0])
        left = left[~(left <= left[0]).all(axis=1)]
    return np.array(found)


@dataclass(frozen=True, eq=False)
class ParameterBytes:
    """Bytes of parameters, gradients and optimizer state between any two positions; each parameter counts once."""

    plain: Floats  # running sum of parameters that are used in one place
    # places (in order) and bytes of parameters that are used in several places
    ties: tuple[tuple[tuple[int, ...], float], ...] = ()

    @classmethod
    def of(cls, profile: Profile, positions: Positions) -> ParameterBytes:
        """Return the bytes of a profile; a place is the interval between a position and the next."""
        place_of = np.searchsorted(positions, np.arange(len(profile.graph.nodes)), side="right") - 1
        places: dict[str, dict[int, None]] = {}
        for node, place in zip(profile.graph.nodes, place_of.tolist(), strict=True):
            for name in node.parameters:
                places.setdefault(name, {})[place] = None
        plain, tied = np.zeros(len(positions)), dict[tuple[int, ...], float]()
        for name, used in places.items():
            parameter = profile.graph.parameters[name]
            size = parameter.num_bytes * (2 + profile.optimizer_bytes if parameter.is_trainable else 1)
            if len(used) == 1:
                plain[next(iter(used)) + 1] += size
            else:  # parameters that are used in the same places are merged
                tied[tuple(used)] = tied.get(tuple(used), 0.0) + size
        return cls(np.cumsum(plain), tuple(tied.items()))

    def used_by(self, spans: Iterable[Span]) -> frozenset[int]:
        """Return the indices of the ties that are used within the given stages."""
        chosen = list(spans)
        return frozenset(
            index for index, (places, _) in enumerate(self.ties) if any(a <= p < b for a, b in chosen for p in places)
        )

    def total(self, spans: Iterable[Span]) -> float:
        """Return the bytes of all parameters of the given stages on one lane."""
        chosen = list(spans)
        alone = sum(float(self.plain[b] - self.plain[a]) for a, b in chosen)
        return alone + sum(self.ties[index][1] for index in self.used_by(chosen))

    def beside(self, used: frozenset[int]) -> ParameterBytes:
        """Return the bytes without the ties that are on the lane already."""
        return replace(self, ties=tuple(tie for index, tie in enumerate(self.ties) if index not in used))

    @cached_property
    def uses(self) -> Floats:
        """Running sum over all uses: a tied parameter counts at each use."""
        change = np.zeros(len(self.plain))
        for places, size in self.ties:
            change[np.array(places) + 1] += size
        return self.plain + np.cumsum(change)

    @cached_property
    def _table(self) -> tuple[Floats, Positions, Positions] | None:
        """Sums over pairs of neighbouring uses that start at or after one position and end before another."""
        pairs = [(a, b, size) for places, size in self.ties for a, b in pairwise(places)]
        starts, row = np.unique([a for a, _, _ in pairs], return_inverse=True)
        ends, column = np.unique([b for _, b, _ in pairs], return_inverse=True)
        if len(starts) * len(ends) > _MOST_TABLE:
            return None
        table = np.zeros((len(starts) + 1, len(ends) + 1))
        np.add.at(table, (row, column + 1), [size for _, _, size in pairs])
        table = np.cumsum(np.cumsum(table[::-1], axis=0)[::-1], axis=1)
        everywhere = np.arange(len(self.plain))
        return table, np.searchsorted(starts, everywhere), np.searchsorted(ends, everywhere)

    def repeated(self, first: Positions, last: Positions) -> Floats:
        """Return the bytes that `uses` counts more than once between positions."""
        if self._table is not None:
            table, row, column = self._table
            return np.asarray(table[row[first], column[last]])
        over = np.zeros(len(first))
        for places, size in self.ties:
            count = np.searchsorted(places, last) - np.searchsorted(places, first)
            over += size * np.maximum(count - 1, 0)
        return over


@dataclass(frozen=True, eq=False)
class LaneMemory:
    """Memory of lanes as a function of the cuts."""

    limits: Floats  # limit of each lane in bytes
    holdings: tuple[Holding, ...]  # what each lane holds
    saved: Floats  # running sum of saved bytes, by position
    pending: Floats  # running sum of pending bytes, by position
    kept: Floats  # input bytes that a recomputing stage keeps if it starts at a position: all values that cross it
    parameters: ParameterBytes  # parameters with their gradients and optimizer state
    _cache: dict[frozenset[int], ParameterBytes] = field(default_factory=dict)

    def held(self, lane: int, spans: Sequence[Span]) -> Floats:
        """Return the bytes of saved values at each moment that can be the peak of a lane."""
        first, last = (np.array([span[end] for span in spans], dtype=np.int64) for end in (0, 1))
        saved, pending = self.saved[last] - self.saved[first], self.pending[last] - self.pending[first]
        each = np.stack([saved, pending, self.kept[first]])
        return np.asarray((self.holdings[lane].counts * each).sum(axis=(1, 2)))

    def lane_bytes(self, spans: Sequence[Span]) -> list[float]:
        """Return the peak bytes of each lane, given the spans of all stages."""
        own = [[spans[stage] for stage in holding.stages] for holding in self.holdings]
        return [self.parameters.total(s) + float(self.held(lane, s).max()) if s else 0.0 for lane, s in enumerate(own)]

    def excess(self, spans: Sequence[Span]) -> Floats:
        """Return the bytes by which each lane exceeds its limit (0 if it does not), given the spans of all stages."""
        over = np.array(self.lane_bytes(spans)) - self.limits
        return np.where(over > self.limits * (_MEETS - 1), over, 0.0)

    def furthest(self, lane: int, stage: int, others: dict[int, Span], within: Span | None = None) -> Positions:
        """Return the last possible end of a stage for each start; an end before the start means that none fits.

        Stages of the lane that are not in `others` count as empty. Only positions `within` are considered.
        """
        holding = self.holdings[lane]
        at = holding.stages.index(stage)
        beside = self._beside(self.parameters.used_by(others.values()))
        spans = [others.get(s, (0, 0)) if s != stage else (0, 0) for s in holding.stages]
        rest = self.limits[lane] * _MEETS - self.held(lane, spans) - self.parameters.total(others.values())
        first, last = within or (0, len(self.saved) - 1)
        reach = np.full(len(self.saved), last)
        here = slice(first, last + 1)
        for left, (saved, pending, kept) in _tightest(rest, holding.counts[:, :, at]):
            used = saved * self.saved + pending * self.pending
            ends = _last_within(used[here], left - kept * self.kept[here], beside, first)
            reach[here] = np.minimum(reach[here], first + ends)
        return reach

    def _beside(self, used: frozenset[int]) -> ParameterBytes:
        return self._cache.setdefault(used, self.parameters.beside(used))


def _tightest(room: Floats, counts: Floats) -> list[tuple[float, list[float]]]:
    """Return the moments that can be full first: no other moment holds more and has less room."""
    moments = np.concatenate([-room[:, None], counts], axis=1)
    shifted = moments - moments.min(axis=0, initial=0.0)
    kept = _fullest(shifted) + moments.min(axis=0, initial=0.0)
    return [(-float(row[0]), row[1:].tolist()) for row in kept]


def _last_within(used: Floats, room: Floats, parameters: ParameterBytes, first: int) -> Positions:
    """Return for each start the last end for which `used` and the parameters fit into the room.

    Starts and ends are relative to the first position.
    """
    total = used + parameters.uses[first : first + len(used)]
    everywhere = np.arange(len(total))
    last = np.searchsorted(total, total + room, side="right") - 1
    if not parameters.ties:
        return last
    # ties were counted at each use: the answer lies between this end and the end without the repeated bytes
    again = parameters.repeated(first + everywhere, np.full_like(everywhere, first + len(total) - 1))
    most = np.maximum(np.searchsorted(total, total + room + again, side="right") - 1, last)
    last, todo = np.maximum(last, 0), np.flatnonzero(most > np.maximum(last, everywhere))
    low, high = np.maximum(last[todo], todo), most[todo]
    while (open_ := low < high).any():
        middle = (low + high + 1) // 2
        fits = total[middle] - total[todo] - parameters.repeated(first + todo, first + middle) <= room[todo]
        low, high = np.where(open_ & fits, middle, low), np.where(open_ & ~fits, middle - 1, high)
    last[todo] = np.where(room[todo] < 0, -1, low)
    return last
