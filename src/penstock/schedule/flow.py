"""Flow: the rule table applied to whole lanes: for each action, the positions of the actions that it waits for.

`Rows` is a table of actions, lane after lane. An action is identified by its position in this table. The table
holds a schedule as built (compute only: a value passes directly from maker to user) or a lowered one (the user
waits for the receive).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError
from penstock.schedule.actions import KIND_INDEX, KINDS, Action, Ints, Kind, decode
from penstock.schedule.rules import RULES, At, Copy, Need, Value
from penstock.schedule.schedule import Schedule

NONE = -1  # nothing to wait for
MISSING = -2  # needed, but no action makes it

# the kinds of a schedule as built; lowering adds the others
BUILT = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)


@dataclass(frozen=True)
class Rows:
    """All actions of all lanes, one lane after the other, as columns."""

    kind: NDArray[np.int8]
    stage: Ints
    mb: Ints
    lane: Ints
    peer: Ints  # of a transfer: the stage at the other end; else -1
    starts: NDArray[np.int64]  # lane l has the positions starts[l] .. starts[l + 1] - 1
    given_at: Ints | None = None  # if rows were dropped: the original index of each action in its lane

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def of(cls, schedule: Schedule) -> Rows:
        """Return the rows of a schedule as built."""
        kind, stage, mb = decode(schedule.codes())
        sizes = [len(lane) for lane in schedule.lanes]
        lane = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return cls(kind, stage, mb, lane, np.full(len(kind), NONE, dtype=np.int32), starts)

    def where(self, kind: Kind) -> NDArray[np.int64]:
        """Return the positions of one kind."""
        return np.flatnonzero(self.kind == KIND_INDEX[kind])

    @cached_property
    def present(self) -> tuple[Kind, ...]:
        """The kinds that occur, in the order of KINDS."""
        counts = np.bincount(self.kind, minlength=len(KINDS))
        return tuple(kind for kind in KINDS if counts[KIND_INDEX[kind]])

    def action(self, position: int) -> Action:
        """Return the action at a position."""
        return Action(KINDS[self.kind[position]], int(self.stage[position]), int(self.mb[position]))

    def index(self, position: int) -> int:
        """Return the index of an action in its lane."""
        if self.given_at is not None:
            return int(self.given_at[position])
        return int(position - self.starts[self.lane[position]])

    def without(self, places: Iterable[tuple[int, int]]) -> Rows:
        """Return the rows without those at the given (lane, index) places; the others keep their index."""
        keep = np.ones(len(self), dtype=np.bool_)
        keep[[int(self.starts[lane]) + index for lane, index in places]] = False
        given_at = (np.arange(len(self)) - self.starts[self.lane]).astype(np.int32)
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.lane[keep], minlength=len(self.starts) - 1))])
        cut = {name: getattr(self, name)[keep] for name in ("kind", "stage", "mb", "lane", "peer")}
        return Rows(**cut, starts=starts.astype(np.int64), given_at=given_at[keep])


def edges_of(num_stages: int, skips: Iterable[Sequence[int]] = ()) -> tuple[tuple[int, int], ...]:
    """Return the (from, to) pairs of stages that pass values: each stage to its next, and the skips.

    Raises:
        ScheduleError: if a skip does not lead from a stage to a later one.
    """
    chain = [(s, s + 1) for s in range(num_stages - 1)]
    extra = check_skips(skips)
    for skip in extra:
        if not 0 <= skip[0] < skip[1] < num_stages:
            raise ScheduleError(f"a skip must lead from a stage to a later one; skip: {skip}, stages: {num_stages}")
    return tuple(dict.fromkeys([*chain, *sorted(extra)]))


def check_skips(skips: Iterable[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    """Return skips as pairs of integers; refuse anything else with a ScheduleError."""
    try:
        return tuple((operator.index(source), operator.index(target)) for source, target in skips)
    except (TypeError, ValueError):
        raise ScheduleError(f"skips must be pairs (from stage, to stage) of whole numbers; given: {skips!r}") from None


@dataclass(frozen=True)
class Flow:
    """For each action, the positions it waits for (padded with NONE); for each value, the position that makes it."""

    rows: Rows
    edges: tuple[tuple[int, int], ...]
    needs: Ints  # [actions, maximum number of needs]
    made: dict[Value, Ints]  # [stages, micro-batches] -> position

    def needed(self, position: int, column: int) -> tuple[Value, int]:
        """Return the value of one entry of `needs`, and the stage that makes it."""
        stage = int(self.rows.stage[position])
        for need in RULES[KINDS[self.rows.kind[position]]].needs:
            if need.at in (At.HERE, At.PEER):
                if column == 0:
                    return need.value, stage if need.at is At.HERE else int(self.rows.peer[position])
                column -= 1
                continue
            incoming = _incoming(self.edges, need.value)
            if column < max(map(len, incoming.values()), default=0):
                return need.value, self.edges[incoming[stage][column]][_CROSSES[need.value]]
            column -= max(map(len, incoming.values()), default=0)
        raise IndexError(column)


# Values that pass between stages, and the end of the edge that makes them: 0 its source, 1 its target.
_CROSSES = {Value.ACTIVATION: 0, Value.GRADIENT: 1, Value.SENT_ACTIVATION: 0, Value.SENT_GRADIENT: 1}


def _incoming(edges: Sequence[tuple[int, int]], value: Value) -> dict[int, list[int]]:
    """Return for each stage the indices of the edges through which it receives a value."""
    incoming: dict[int, list[int]] = {}
    for index, edge in enumerate(edges):
        incoming.setdefault(edge[1 - _CROSSES[value]], []).append(index)
    return incoming


def trace_flow(schedule: Schedule, rows: Rows | None = None, *, skips: Iterable[Sequence[int]] = ()) -> Flow:
    """Apply the rule table to the rows of a schedule; rows must be within its stages and micro-batches."""
    rows = Rows.of(schedule) if rows is None else rows
    tracer = _Tracer(schedule, rows, edges_of(schedule.num_stages, skips))
    columns: list[Ints] = []
    for kind in rows.present:
        at = rows.where(kind)
        filled = 0
        for need in RULES[kind].needs:
            for makers, users in tracer.waits(need, at):
                if filled == len(columns):
                    columns.append(np.full(len(rows), NONE, dtype=np.int32))
                columns[filled][users] = makers
                filled += 1
    needs = np.stack(columns, axis=1) if columns else np.full((len(rows), 1), NONE, dtype=np.int32)
    return Flow(rows, tracer.edges, needs, tracer.made)


class _Tracer:
    """Records where each value is made and remade, and finds the maker of each value that a row waits for."""

    def __init__(self, schedule: Schedule, rows: Rows, edges: tuple[tuple[int, int], ...]) -> None:
        self.rows, self.edges = rows, edges
        self.num_stages, self.num_mbs = schedule.num_stages, schedule.num_mbs
        self.made: dict[Value, Ints] = {}
        self.remade: dict[Value, Ints] = {}
        self.sent: dict[Value, Ints] = {}
        for kind in rows.present:
            at = rows.where(kind)
            for value in RULES[kind].makes:
                if value in (Value.SENT_ACTIVATION, Value.SENT_GRADIENT):
                    self._table(self.sent, value, len(edges))[self._edge(at, value), rows.mb[at]] = at
                else:
                    self._table(self.made, value, self.num_stages)[rows.stage[at], rows.mb[at]] = at
            for value in RULES[kind].remakes:
                if value in _CROSSES:
                    self._table(self.remade, value, len(edges))[self._edge(at, value, receiving=True), rows.mb[at]] = at
                else:
                    self._table(self.remade, value, self.num_stages)[rows.stage[at], rows.mb[at]] = at

    def _table(self, tables: dict[Value, Ints], value: Value, height: int) -> Ints:
        if value not in tables:
            tables[value] = np.full((height, self.num_mbs), MISSING, dtype=np.int32)
        return tables[value]

    def _edge(self, at: NDArray[np.int64], value: Value, *, receiving: bool = False) -> NDArray[np.int64]:
        """Return the edge of each transfer row: activations go from source to target, gradients back."""
        here, peer = self.rows.stage[at], self.rows.peer[at]
        makes_here = (_CROSSES[value] == 0) != receiving
        source, target = (here, peer) if makes_here else (peer, here)
        # look up in sorted keys: a table of stages x stages would be large
        keys = np.array([a * self.num_stages + b for a, b in self.edges], dtype=np.int64)
        order = np.argsort(keys)
        wanted = source.astype(np.int64) * self.num_stages + target
        found = np.full(len(at), -1, dtype=np.int64)
        if len(keys):
            near = order[np.minimum(np.searchsorted(keys, wanted, sorter=order), len(keys) - 1)]
            found = np.where(keys[near] == wanted, near, -1)
        if (found < 0).any():
            bad = int(at[np.argmin(found)])
            raise ScheduleError(
                f"{self.rows.action(bad)} passes a value to stage {self.rows.peer[bad]}, but no edge leads there"
            )
        return found

    def waits(self, need: Need, at: NDArray[np.int64]) -> Iterable[tuple[Ints, NDArray[np.int64]]]:
        """Yield (maker positions, user positions) for one need of the rows at the given positions."""
        rows = self.rows
        if need.at is At.HERE:
            yield self._find(need, rows.stage[at], rows.mb[at]), at
        elif need.at is At.PEER:
            table = self._table(self.sent, need.value, len(self.edges))
            yield table[self._edge(at, need.value, receiving=True), rows.mb[at]], at
        else:
            yield from self._waits_across(need, at)

    def _find(self, need: Need, stage: Ints, mb: Ints) -> Ints:
        found = self._table(self.made, need.value, self.num_stages)[stage, mb]
        if need.copy is Copy.LATEST and need.value in self.remade and need.value not in _CROSSES:
            again = self.remade[need.value][stage, mb]
            found = np.where(again >= 0, again, found)
        return found

    def _waits_across(self, need: Need, at: NDArray[np.int64]) -> Iterable[tuple[Ints, NDArray[np.int64]]]:
        """Yield the same for values that arrive through edges: round k handles the k-th incoming edge of each stage."""
        rows, maker_end = self.rows, _CROSSES[need.value]
        incoming = _incoming(self.edges, need.value)
        edge_ends = np.array(self.edges, dtype=np.int32).reshape(-1, 2)
        made = self._table(self.made, need.value, self.num_stages)
        for k in range(max(map(len, incoming.values()), default=0)):
            edge_of = np.full(self.num_stages, -1, dtype=np.int64)
            for stage, edges in incoming.items():
                edge_of[stage] = edges[k] if k < len(edges) else -1
            edge = edge_of[rows.stage[at]]
            users, edge = at[edge >= 0], edge[edge >= 0]
            found = made[edge_ends[edge, maker_end], rows.mb[users]]
            if need.value in self.remade:
                again = self.remade[need.value][edge, rows.mb[users]]
                found = np.where(again >= 0, again, found)
            yield found, users


def pair_rows(schedule: Schedule, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of the first and the second action of each pair; rows may be built or lowered."""
    if not schedule.overlaps:
        none = np.empty(0, dtype=np.int64)
        return none, none
    place = np.flatnonzero(np.isin(rows.kind, [KIND_INDEX[kind] for kind in BUILT]))
    starts = np.cumsum([0] + [len(lane) for lane in schedule.lanes])
    first = np.array(sorted(starts[lane] + index for lane, index in schedule.overlaps), dtype=np.int64)
    return place[first], place[first + 1]


def wait_together(needs: Ints, first: NDArray[np.int64], second: NDArray[np.int64]) -> Ints:
    """Let the first action of each pair also wait for the needs of the second, so that both start together."""
    if not len(first):
        return needs
    width = needs.shape[1]
    joined = np.full((len(needs), 2 * width), NONE, dtype=np.int32)
    joined[:, :width] = needs
    joined[first, width:] = needs[second]
    return joined
