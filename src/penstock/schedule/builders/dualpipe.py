"""dualpipe, dualpipe_v: forwards and backwards of two directions overlap (DeepSeek-V3, 2024; cut in half: 2025).

dualpipe runs two ways over its lanes; each lane holds one stage of each way. dualpipe_v folds this picture in the
middle: one way, two stages per lane, placed as a V. Both have the same eight phases. The table shows them for the
lane whose distance to the middle is d; 0 is its own direction and 1 the other. A pair in brackets overlaps. I and W
are a backward in two parts:

    1  0F           2·d times        fill the own direction
    2  0F 1F        half-d times     both directions arrive
    3  1I 1W 1F     d times          start the backward of the other direction
    4  [0F 1B] [1F 0B]               the steady state
    5  1B [1F 0B]   d times          the own direction has no forwards left
    6  1B 0B        half-d times     drain; in the second half, backwards run in two parts
    7  W 0I         d times          weight gradients fill the drain
    8  W            half-d times     the remaining weight gradients

where `half` is the number of lanes on one side of the middle.
"""

from __future__ import annotations

from collections import deque

from penstock.schedule.actions import Action, Kind, Lane
from penstock.schedule.counts import loop, need_even_lanes, snake
from penstock.schedule.schedule import Schedule


def dualpipe(*, lanes: int, micro_batches: int) -> Schedule:
    """Two ways over an even number of lanes; micro-batches alternate between them."""
    need_even_lanes("dualpipe", lanes)
    down, half = loop(lanes, 1), lanes // 2
    each_way = max(lanes, (micro_batches + 1) // 2)  # the phases need this many; surplus micro-batches are dropped
    drafts = []
    for lane in range(lanes):
        own = 0 if lane < half else 1
        d = half - 1 - min(lane, lanes - 1 - lane)
        draft = _Draft(stages=(lane, lanes - 1 - lane), own=own, mb_stride=2, num_mbs=micro_batches)
        drafts.append(_fill(draft, d=d, half=half, each_way=each_way))
    return _finish("dualpipe", drafts, (down, down[::-1]), micro_batches)


def dualpipe_v(*, lanes: int, micro_batches: int) -> Schedule:
    """One way, two stages per lane: stage s and its mirror image are on the same lane."""
    each_way = max(2 * lanes, micro_batches)
    drafts = []
    for lane in range(lanes):
        draft = _Draft(stages=(lane, 2 * lanes - 1 - lane), own=0, mb_stride=1, num_mbs=micro_batches)
        drafts.append(_fill(draft, d=lanes - 1 - lane, half=lanes, each_way=each_way))
    return _finish("dualpipe_v", drafts, (snake(lanes, 2),), micro_batches)


class _Draft:
    """A lane under construction: the next micro-batch of each direction, postponed weight gradients, overlaps."""

    def __init__(self, *, stages: tuple[int, int], own: int, mb_stride: int, num_mbs: int) -> None:
        self.stages, self.own, self.mb_stride, self.num_mbs = stages, own, mb_stride, num_mbs
        self.next_f, self.next_b = [0, 0], [0, 0]
        self.postponed: deque[tuple[int, int]] = deque()
        self.actions: list[Action] = []
        self.overlaps: list[int] = []

    def forward(self, direction: int) -> bool:
        mb = self._mb(direction, self.next_f)
        return self._add(Kind.F, direction, mb)

    def backward(self, direction: int, *, in_two: bool = False) -> bool:
        mb = self._mb(direction, self.next_b)
        if in_two and mb < self.num_mbs:
            self.postponed.append((direction, mb))
        return self._add(Kind.I if in_two else Kind.B, direction, mb)

    def weight(self) -> None:
        if self.postponed:
            self._add(Kind.W, *self.postponed.popleft())

    def overlapped(self, forward: int, backward: int) -> None:
        at = len(self.actions)
        if self.forward(forward) & self.backward(backward):
            self.overlaps.append(at)

    def _mb(self, direction: int, counts: list[int]) -> int:
        counts[direction] += 1
        way = (direction ^ self.own) if self.mb_stride == 2 else 0
        return (counts[direction] - 1) * self.mb_stride + way

    def _add(self, kind: Kind, direction: int, mb: int) -> bool:
        if mb < self.num_mbs:
            self.actions.append(Action(kind, self.stages[direction ^ self.own], mb))
        return mb < self.num_mbs


def _fill(draft: _Draft, *, d: int, half: int, each_way: int) -> _Draft:
    """Write the eight phases; `each_way` micro-batches pass in each direction."""
    near = half - d
    for _ in range(2 * d):
        draft.forward(0)
    for _ in range(near):
        draft.forward(0)
        draft.forward(1)
    for _ in range(d):
        draft.backward(1, in_two=True)
        draft.weight()
        draft.forward(1)
    for turn in range(each_way - 2 * half + near):
        if turn == 0 and d == 0:  # the middle lane needs this forward's output for the backward: no overlap yet
            draft.forward(0)
            draft.backward(1)
        else:
            draft.overlapped(0, 1)
        draft.overlapped(1, 0)
    for _ in range(d):
        draft.backward(1)
        draft.overlapped(1, 0)
    for turn in range(2 * near):
        draft.backward(1 - turn % 2, in_two=turn >= near)
    for _ in range(d):
        draft.weight()
        draft.backward(0, in_two=True)
    while draft.postponed:
        draft.weight()
    return draft


def _finish(name: str, drafts: list[_Draft], ways: tuple[tuple[int, ...], ...], micro_batches: int) -> Schedule:
    overlaps = frozenset((lane, at) for lane, draft in enumerate(drafts) for at in draft.overlaps)
    lanes = tuple(Lane.of(draft.actions) for draft in drafts)
    return Schedule(lanes, ways, micro_batches, overlaps=overlaps, name=name)
