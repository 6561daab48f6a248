"""Greedy search: simulate the lanes, and choose the next action of each lane whenever it is free.

This is list scheduling. A free lane considers the actions whose inputs are available and the values in transit, and
follows a `Policy`:

    1  run an input gradient if one is ready: it frees memory and feeds the lane before
    2  otherwise run a forward if one is ready, and memory and the policy's cap on forwards ahead allow it
    3  otherwise run a weight gradient if it fits before the next arrival, according to the policy's patience
    4  otherwise wait for the next arrival

`search` tries many policies and keeps the best result.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.model.costs import StageCosts
from penstock.schedule.actions import KIND_INDEX, MB_BITS, STAGE_BITS, Kind, Lane
from penstock.schedule.schedule import Schedule

# what a search minimises: the step from the first start to the last end, or the longest lane span
Objective = Literal["step", "span"]

_KIND_CODE = {kind: KIND_INDEX[kind] << (STAGE_BITS + MB_BITS) for kind in Kind}


@dataclass(frozen=True)
class Problem:
    """A scheduling problem: stages on lanes, their costs, and the memory limit of each lane."""

    name: str
    lane_of: tuple[int, ...]
    num_mbs: int
    costs: StageCosts
    limit_bytes: tuple[float, ...]
    splits_backward: bool = True
    order: tuple[Lane, ...] | None = None  # fixed order of forwards and input gradients; weight gradients fill gaps

    @property
    def num_lanes(self) -> int:
        """Number of lanes."""
        return 1 + max(self.lane_of)


@dataclass(frozen=True)
class Policy:
    """The rules by which lanes choose."""

    # for each lane, the maximum number of micro-batches whose first stage still lacks the backward
    caps: tuple[int, ...]
    patience: float  # a weight gradient starts if the next arrival is at least this share of its time away
    f_patience: float  # the same for a forward, compared with the arrival of the next input gradient


@dataclass(frozen=True)
class Draft:
    """A schedule with its makespan and its longest lane span."""

    schedule: Schedule
    step_seconds: float
    span_seconds: float

    def length(self, objective: Objective) -> float:
        """Return the length that a search minimises."""
        return self.step_seconds if objective == "step" else self.span_seconds


def write_schedule(problem: Problem, policy: Policy) -> Draft | None:
    """Return the schedule that a policy writes, or None if it reaches a dead end."""
    return _Clock(problem, policy).run()


class _Clock:
    """The state of the lanes while a schedule is written."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.problem, self.policy = problem, policy
        costs, num_stages, num_lanes = problem.costs, len(problem.lane_of), problem.num_lanes
        self.last = num_stages - 1
        self.seconds_f = costs.forward.tolist()
        self.seconds_b = (costs.input_grad if problem.splits_backward else costs.backward).tolist()
        self.seconds_w = costs.weight_grad.tolist()
        self.lag = costs.transfer.tolist()
        self.pending = costs.pending_bytes.tolist() if problem.splits_backward else [0.0] * num_stages
        # if more bytes are pending than were saved, there must be room for them before the backward
        self.saved = [max(s, p) for s, p in zip(costs.saved_bytes.tolist(), self.pending, strict=True)]
        self.stages = [[s for s in range(num_stages) if problem.lane_of[s] == lane] for lane in range(num_lanes)]
        self.next_f, self.next_b = [0] * num_stages, [0] * num_stages
        # unused arrivals, oldest first: the time when the input, or the output gradient, of a micro-batch arrives
        self.inputs: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.gradients: list[deque[float]] = [deque() for _ in range(num_stages)]
        self.inputs[0].extend([0.0] * problem.num_mbs)
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(num_lanes)]
        self.held = [0.0] * num_lanes
        self.codes: list[list[int]] = [[] for _ in range(num_lanes)]
        self.free_at = [0.0] * num_lanes
        self.first_start = [math.inf] * num_lanes
        self.events: list[tuple[float, int]] = [(0.0, lane) for lane in range(num_lanes)]
        self.limit = [limit * (1 + 1e-12) for limit in problem.limit_bytes]
        self.order = [deque((a.kind is Kind.F, a.stage) for a in lane) for lane in problem.order or ()]

    def run(self) -> Draft | None:
        events = self.events
        while events:
            now, lane = heapq.heappop(events)
            while events and events[0] == (now, lane):
                heapq.heappop(events)
            if now >= self.free_at[lane]:
                self.choose(lane, now)
        per_mb = 3 if self.problem.splits_backward else 2
        if sum(map(len, self.codes)) != per_mb * len(self.problem.lane_of) * self.problem.num_mbs:
            return None
        spans = [end - start for start, end in zip(self.first_start, self.free_at, strict=True)]
        lanes = tuple(Lane(np.array(codes, dtype=np.int64)) for codes in self.codes)
        schedule = Schedule(lanes, (self.problem.lane_of,), self.problem.num_mbs, name=self.problem.name)
        return Draft(schedule, max(self.free_at), max(spans))

    def choose(self, lane: int, now: float) -> None:
        """Start an action on a free lane, or wait for the next arrival."""
        if self.order:
            self.follow(lane, now)
            return
        next_b, at = math.inf, -1
        for stage in self.stages[lane]:  # earliest stage first: its backward completes a micro-batch
            queue = self.gradients[stage]
            if queue and queue[0] < next_b:
                next_b, at = queue[0], stage
                if next_b <= now:
                    break
        if next_b <= now:
            self.backward(lane, at, now)
            return
        next_f, stage, blocked = self.next_forward(lane, now)
        if next_f <= now and now + self.policy.f_patience * self.seconds_f[stage] <= next_b:
            self.forward(lane, stage, now)
            return
        if self.weights[lane]:
            arrival = min(next_b, next_f if next_f > now else next_b)
            need = self.policy.patience * self.seconds_w[self.weights[lane][0][0]]
            if blocked or arrival - now >= need:
                self.weight(lane, now)

    def follow(self, lane: int, now: float) -> None:
        """Start the next action of the fixed order if it can run, otherwise a weight gradient if there is time."""
        weights, order = self.weights[lane], self.order[lane]
        if not order:
            if weights:
                self.weight(lane, now)
            return
        is_forward, stage = order[0]
        queue = self.inputs[stage] if is_forward else self.gradients[stage]
        arrival = queue[0] if queue else math.inf
        has_room = not is_forward or self.held[lane] + self.saved[stage] <= self.limit[lane]
        if arrival <= now and has_room:
            order.popleft()
            (self.forward if is_forward else self.backward)(lane, stage, now)
        elif weights and (not has_room or arrival - now >= self.policy.patience * self.seconds_w[weights[0][0]]):
            self.weight(lane, now)

    def next_forward(self, lane: int, now: float) -> tuple[float, int, bool]:
        """Return the start and the stage of the next allowed forward, and whether memory blocks a ready forward."""
        best, at, blocked = math.inf, -1, False
        for stage in reversed(self.stages[lane]):  # latest stage first: it is closest to its backward
            queue = self.inputs[stage]
            if not queue or queue[0] >= best:
                continue
            is_first = stage == self.stages[lane][0]
            if is_first and self.next_f[stage] - self.next_b[stage] >= self.policy.caps[lane]:
                continue
            if not self.has_room(lane, stage):
                blocked = blocked or queue[0] <= now
                continue
            best, at = queue[0], stage
            if best <= now:
                break
        return best, at, blocked

    def has_room(self, lane: int, stage: int) -> bool:
        """Return whether memory allows a forward, and afterwards lets all micro-batches in flight pass the lane.

        They can pass one after the other, oldest first: each needs room for its remaining stages and then frees all of
        it. The oldest needs the most room when it is between two stages.
        """
        if self.held[lane] + self.saved[stage] > self.limit[lane]:
            return False
        stages, saved, next_b = self.stages[lane], self.saved, self.next_b
        if len(stages) == 1:
            return True
        next_f = [self.next_f[s] + (s == stage) for s in stages]
        for mb in next_f[1:]:
            need = 0.0
            for s, done in zip(stages, next_f, strict=True):
                need += saved[s] * (max(0, done - max(mb, next_b[s])) + (done <= mb))
            if mb < next_f[0] and need > self.limit[lane]:
                return False
        return True

    def forward(self, lane: int, stage: int, now: float) -> None:
        self.inputs[stage].popleft()
        mb = self.next_f[stage]
        self.next_f[stage] = mb + 1
        self.held[lane] += self.saved[stage]
        end = self.start(lane, _code(Kind.F, stage, mb), now, self.seconds_f[stage])
        if stage == self.last:
            self.gradients[stage].append(end)
        else:
            self.arrive(self.inputs[stage + 1], lane, stage + 1, end, self.lag[stage])

    def backward(self, lane: int, stage: int, now: float) -> None:
        self.gradients[stage].popleft()
        mb = self.next_b[stage]
        self.next_b[stage] = mb + 1
        split = self.problem.splits_backward
        end = self.start(lane, _code(Kind.I if split else Kind.B, stage, mb), now, self.seconds_b[stage])
        # the memory changes at the end of the action, before the lane chooses again
        self.held[lane] += self.pending[stage] - self.saved[stage]
        if split:
            self.weights[lane].append((stage, mb))
        if stage:
            self.arrive(self.gradients[stage - 1], lane, stage - 1, end, self.lag[stage - 1])

    def weight(self, lane: int, now: float) -> None:
        stage, mb = self.weights[lane].popleft()
        self.start(lane, _code(Kind.W, stage, mb), now, self.seconds_w[stage])
        self.held[lane] -= self.pending[stage]

    def start(self, lane: int, code: int, now: float, seconds: float) -> float:
        self.codes[lane].append(code)
        if self.first_start[lane] == math.inf:
            self.first_start[lane] = now
        self.free_at[lane] = end = now + seconds
        heapq.heappush(self.events, (end, lane))
        return end

    def arrive(self, queue: deque[float], lane: int, stage: int, end: float, lag: float) -> None:
        to = self.problem.lane_of[stage]
        when = end if to == lane else end + lag
        queue.append(when)
        heapq.heappush(self.events, (when, to))


def _code(kind: Kind, stage: int, mb: int) -> int:
    return _KIND_CODE[kind] | stage << MB_BITS | mb
