"""Advance: run queues of actions until all are done or none can go on.

A queue is an ordered run of positions: a lane's compute, or what one lane sends to another. The head of
a queue starts when all that it waits for is there and its server is free. Every lane and every private
link is a server of its own; channels that share a link share a server, which takes whoever was ready
first. `verify` runs this without a clock (all durations zero), `simulate` with one.

Each round moves every queue that can move by one place, all of them at once. A queue that cannot is left
alone until what it waits for has ended, so the cost is linear in the work. Heads on shared servers are held
back until nothing else can move. Then whatever comes later is ready no earlier than the earliest
head held now, so that one may go: the result is that of an event loop ordered by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import Ints

__all__ = ["Queues", "Run", "advance"]

Floats = NDArray[np.float64]
Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Queues:
    """Work in queues. Positions number all work; queue q holds first[q] .. last[q] - 1, in this order."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    server: NDArray[np.int64]  # of each queue
    needs: Ints  # [positions, most needs]: positions waited for; negative: nothing
    duration: Floats  # how long the server is busy
    lag: Floats  # from the end to when others see the result


@dataclass(frozen=True)
class Run:
    """When each position started and was seen by others (NaN: never ran), and where each queue stopped."""

    start: Floats
    seen: Floats
    stopped_at: NDArray[np.int64]
    is_done: bool


def advance(queues: Queues) -> Run:
    """Run the queues to the end, or until none can go on."""
    return _Rounds(queues).run()


class _Rounds:
    """The state of the queues between rounds. A round looks only at queues that moved, or whose wait has ended."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        num = len(queues.duration)
        self.start = np.full(num, np.nan)
        self.seen = np.full(num + 1, np.inf)  # the last entry stands for "nothing to wait for"
        self.seen[num] = 0.0
        self.needs = np.where(queues.needs < 0, num, queues.needs)
        self.cursor = queues.first.copy()
        self.free = np.zeros(int(queues.server.max(initial=-1)) + 1)
        # who waits for a position: a chain of queues, its first link here, the others behind it
        self.first_waiter = np.full(num + 1, -1, dtype=np.int32)
        self.next_waiter = np.full(len(queues.first), -1, dtype=np.int32)

    def run(self) -> Run:
        queues, cursor = self.queues, self.cursor
        is_shared = (np.bincount(queues.server, minlength=len(self.free)) > 1)[queues.server]
        has_work = cursor < queues.last
        moving, shared = np.flatnonzero(~is_shared & has_work), np.flatnonzero(is_shared & has_work)
        while True:
            while moving.size:
                moving = self._round(moving)
            shared = shared[cursor[shared] < queues.last[shared]]
            ready = self.seen[self.needs[cursor[shared]]].max(axis=1, initial=0.0)
            if not shared.size or not np.isfinite(ready).any():
                break
            earliest = np.argmin(ready)
            moving = self._start(shared[earliest : earliest + 1], ready[earliest : earliest + 1])
        seen = np.where(np.isinf(self.seen[:-1]), np.nan, self.seen[:-1])
        return Run(self.start, seen, cursor, bool((cursor == queues.last).all()))

    def _round(self, moving: Positions) -> Positions:
        """Move what can move; return the queues to look at next: those that moved, and those that waited for them."""
        at = self.cursor[moving]
        arrivals = self.seen[self.needs[at]]
        ready = arrivals.max(axis=1)
        can = ready < np.inf
        if not can.all():
            blocked = np.flatnonzero(~can)
            unmet = np.argmax(arrivals[blocked] == np.inf, axis=1)
            self._wait(moving[blocked], self.needs[at[blocked], unmet])
            moving, ready = moving[can], ready[can]
        woken = self._start(moving, ready)
        moving = moving[self.cursor[moving] < self.queues.last[moving]]
        return np.concatenate([moving, woken]) if woken.size else moving

    def _start(self, queue: Positions, ready: Floats) -> Positions:
        """Start the heads of some queues; return the queues that waited for them."""
        at, server = self.cursor[queue], self.queues.server[queue]
        begin = np.maximum(ready, self.free[server])
        end = begin + self.queues.duration[at]
        self.start[at], self.free[server], self.seen[at] = begin, end, end + self.queues.lag[at]
        self.cursor[queue] = at + 1
        woken = []
        waiter = self.first_waiter[at]
        while (waiter := waiter[waiter >= 0]).size:
            woken.append(waiter)
            waiter = self.next_waiter[waiter]
        return np.concatenate(woken).astype(np.int64) if woken else np.empty(0, dtype=np.int64)

    def _wait(self, queue: Positions, position: Positions) -> None:
        """Note who waits for what. Of several that wait for the same one writes its note, the rest try again."""
        while queue.size:
            self.next_waiter[queue] = self.first_waiter[position]
            self.first_waiter[position] = queue
            lost = self.first_waiter[position] != queue
            queue, position = queue[lost], position[lost]
