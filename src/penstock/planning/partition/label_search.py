"""Label search: the exact optimum for lanes with several stages, by dominance between partial solutions.

A label is one way to place the first cuts: the position of the last of these cuts, the time of each lane and wire so
far, and the bytes of each lane. A label that is nowhere better than another one is dropped. See
docs/design/partition.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.planning.partition.cut_problem import Problem
from penstock.planning.partition.one_stage_per_lane import SAME
from penstock.schedule.actions import Floats, Positions

_MOST_TIES = 60  # one bit each in an int64
_BLOCK = 256


class OutOfSteps(Exception):  # noqa: N818 - not an error: it ends the search
    """The search used up its steps."""


@dataclass(frozen=True, eq=False)
class _Labels:
    """Labels of one layer, one per row."""

    at: Positions  # position of the last cut
    load: Floats  # [labels, lanes and wires] seconds so far
    held: Floats  # [labels, moments of all lanes] bytes so far
    ties: Positions  # [labels, lanes] the tied parameters of a lane, as bits
    parent: Positions  # the label of the layer before

    def pick(self, rows: Positions) -> _Labels:
        return _Labels(self.at[rows], self.load[rows], self.held[rows], self.ties[rows], self.parent[rows])


@dataclass(eq=False)
class LabelSearch:
    """Places cut after cut. Steps count operations on numbers, so the same problem needs the same steps anywhere."""

    problem: Problem
    steps: int
    _moments: list[tuple[int, Floats]] = field(default_factory=list)  # for each lane: first column, counts

    def __post_init__(self) -> None:
        memory, column = self.problem.memory, 0
        if memory is not None:
            if len(memory.parameters.ties) > _MOST_TIES:
                raise OutOfSteps
            for holding in memory.holdings:
                self._moments.append((column, holding.counts))
                column += len(holding.counts)
        self._num_columns = column

    def best(self, below: float) -> list[int] | None:
        """Return the best cuts with a period below a bound, or None."""
        layers = self._run(below, by_rank=False)
        if layers is None:
            return None
        return _trace(layers, int(np.argmin(layers[-1].load.max(axis=1))))

    def first(self, within: float) -> list[int] | None:
        """Return cuts within a period: each cut in turn is the narrowest possible, and then the earliest."""
        layers = self._run(within * (1 + SAME), by_rank=True)
        return None if layers is None else _trace(layers, 0)

    def _run(self, limit: float, *, by_rank: bool) -> list[_Labels] | None:
        problem = self.problem
        num_wires, lanes = len(problem.wire_names), problem.num_lanes
        layers = [
            _Labels(
                np.zeros(1, dtype=np.int64),
                np.zeros((1, lanes + num_wires)),
                np.zeros((1, self._num_columns)),
                np.zeros((1, lanes), dtype=np.int64),
                np.zeros(1, dtype=np.int64),
            )
        ]
        for stage in range(problem.num_stages):
            grown = self._grow(layers[-1], stage, limit)
            if not len(grown.at):
                return None
            layers.append(self._uncovered(grown, stage, by_rank=by_rank))
        return layers

    def _spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise OutOfSteps

    def _grow(self, labels: _Labels, stage: int, limit: float) -> _Labels:
        """Return all labels with one more stage that are within the limits."""
        problem = self.problem
        end, left = len(problem.positions) - 1, problem.num_stages - 1 - stage
        last = np.minimum(problem.until_forced[labels.at], end - left)
        first = labels.at + 1 if left else np.full(len(labels.at), end)
        count = np.maximum(last - first + 1, 0)
        self._spend(int(count.sum()) * (labels.load.shape[1] + labels.held.shape[1] + 4))
        parent = np.repeat(np.arange(len(labels.at)), count)
        at = first[parent] + np.arange(len(parent)) - np.repeat(np.cumsum(count) - count, count)
        load = labels.load[parent]
        self._add_seconds(load, stage, labels.at[parent], at)
        fine = (load <= limit).all(axis=1) & self._has_room(load, at, stage, limit)
        parent, at, load = parent[fine], at[fine], load[fine]
        held, ties = labels.held[parent], labels.ties[parent]
        if problem.memory is not None:
            fine = self._add_bytes(held, ties, stage, labels.at[parent], at)
            return _Labels(at, load, held, ties, parent).pick(np.flatnonzero(fine))
        return _Labels(at, load, held, ties, parent)

    def _add_seconds(self, load: Floats, stage: int, start: Positions, end: Positions) -> None:
        problem = self.problem
        for lane, share in problem.share_of(stage).items():
            load[:, lane] += share * (problem.seconds[end] - problem.seconds[start]) / problem.speeds[lane]
        if stage == problem.num_stages - 1:
            return
        if problem.transfers == "waited":
            for source, target, share in problem.hops(stage):
                for lane in (source, target):
                    load[:, lane] += share * problem.trip(source, target)[end] / 2
        for wire, (there, back) in problem.wires[stage].items():
            column = problem.num_lanes + problem.wire_names.index(wire)
            load[:, column] += there * problem.width[end] + back * problem.grad_width[end]

    def _has_room(self, load: Floats, at: Positions, stage: int, limit: float) -> NDArray[np.bool_]:
        """Return for each label whether the lanes of the remaining stages can take the remaining work."""
        problem = self.problem
        lanes = sorted(self._lanes_after(stage))
        room = ((limit - load[:, lanes]) * problem.speeds[lanes]).sum(axis=1)
        return np.asarray(problem.seconds[-1] - problem.seconds[at] <= room + SAME * problem.seconds[-1])

    def _lanes_after(self, stage: int) -> set[int]:
        return {lane for s in range(stage + 1, self.problem.num_stages) for lane in self.problem.share_of(s)}

    def _add_bytes(
        self, held: Floats, ties: Positions, stage: int, start: Positions, end: Positions
    ) -> NDArray[np.bool_]:
        """Add the bytes of a stage to each of its lanes; return which labels still fit."""
        memory = self.problem.memory
        assert memory is not None
        fine = np.ones(len(held), dtype=np.bool_)
        saved, pending = memory.saved[end] - memory.saved[start], memory.pending[end] - memory.pending[start]
        for lane in self.problem.share_of(stage):
            column, counts = self._moments[lane]
            here = counts[:, :, memory.holdings[lane].stages.index(stage)]
            bytes_ = memory.parameters.plain[end] - memory.parameters.plain[start]
            for index, (places, size) in enumerate(memory.parameters.ties):
                uses = np.array(places)
                is_new = (ties[:, lane] >> index) & 1 == 0
                is_new &= np.searchsorted(uses, end) > np.searchsorted(uses, start)
                bytes_ = bytes_ + size * is_new
                ties[is_new, lane] |= 1 << index
            block = slice(column, column + len(counts))
            held[:, block] += np.stack([saved, pending, memory.kept[start]], axis=1) @ here.T + bytes_[:, None]
            fine &= (held[:, block] <= memory.limits[lane] * (1 + SAME)).all(axis=1)
        return fine

    def _uncovered(self, labels: _Labels, stage: int, *, by_rank: bool) -> _Labels:
        """Return the labels that no other label at the same position dominates, in the order of rank."""
        lanes = sorted(self._lanes_after(stage))
        columns, key = self._compared(labels, stage, lanes, by_rank=by_rank)
        if by_rank:  # parents are in the order of rank; among the children of one parent, narrower cuts come first
            order = np.lexsort((labels.at, self.problem.width[labels.at], labels.parent))
        else:
            order = np.argsort(columns.sum(axis=1), kind="stable")
        one = key.ravel() if key.shape[1] == 1 else key
        _, group = np.unique(one, axis=None if one.ndim == 1 else 0, return_inverse=True)
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        by_group = np.lexsort((rank, group.ravel()))
        bounds = np.flatnonzero(np.diff(group.ravel()[by_group], prepend=-1))
        kept = [self._front(columns, rows) for rows in np.split(by_group, bounds[1:])]
        rows = np.concatenate(kept)
        return labels.pick(rows[np.argsort(rank[rows], kind="stable")])

    def _compared(self, labels: _Labels, stage: int, lanes: list[int], *, by_rank: bool) -> tuple[Floats, Positions]:
        """Return the columns in which labels are compared, and the key that must be equal for a comparison."""
        problem = self.problem
        wires = {w for used in problem.wires[stage + 1 :] for w in used}
        open_ = [*lanes, *(problem.num_lanes + i for i, wire in enumerate(problem.wire_names) if wire in wires)]
        parts = [labels.load[:, open_]]
        if not by_rank:  # of finished lanes and wires, only the longest matters
            parts.append(labels.load.max(axis=1, keepdims=True))
        key = [labels.at[:, None]]
        if problem.memory is not None:
            for lane in lanes:
                column, counts = self._moments[lane]
                parts.append(labels.held[:, column : column + len(counts)])
            key.append(labels.ties[:, lanes])
        return np.concatenate(parts, axis=1), np.concatenate(key, axis=1)

    def _front(self, columns: Floats, rows: Positions) -> Positions:
        """Return the rows that no earlier row dominates."""
        kept = np.zeros(0, dtype=np.int64)
        for begin in range(0, len(rows), _BLOCK):
            block = rows[begin : begin + _BLOCK]
            self._spend(len(block) * (len(kept) + len(block)) * columns.shape[1] // 8)
            mine = columns[block]
            if len(kept):
                covered = _covers(columns[kept], mine).any(axis=1)
                block, mine = block[~covered], mine[~covered]
            covered = (_covers(mine, mine) & np.tri(len(mine), k=-1, dtype=np.bool_)).any(axis=1)
            kept = np.concatenate([kept, block[~covered]])
        return kept


def _covers(these: Floats, those: Floats) -> NDArray[np.bool_]:
    """[those, these] whether each row of `these` is at most as large as each row of `those` in all columns."""
    found = np.ones((len(those), len(these)), dtype=np.bool_)
    for column in range(these.shape[1]):  # column by column: faster than reducing along the short axis
        found &= these[None, :, column] <= those[:, None, column]
    return found


def _trace(layers: list[_Labels], row: int) -> list[int]:
    """Return the cuts of a label of the last layer."""
    cuts = []
    for layer in reversed(layers[1:]):
        cuts.append(int(layer.at[row]))
        row = int(layer.parent[row])
    return cuts[::-1][:-1]
