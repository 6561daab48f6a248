"""Lane advance: run queues of actions until all are done or none can continue.

A queue is an ordered run of positions: the compute of a lane, or the messages from one lane to another. The
head of a queue starts when its inputs are available and its server is free. Each lane and each private link has
its own server. Channels that share a link share a server, which serves the head that was ready first. `verify`
runs the queues with all durations zero, `simulate` with real durations.

Each round advances every queue that can move by one position, all at once. A blocked queue is skipped until its
input has ended, so the cost is linear in the amount of work. Heads on shared servers wait until nothing else
can move. No later head can then be ready before the earliest of them, so that one starts. The result is that of
an event loop ordered by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import Floats, Ints, Positions


@dataclass(frozen=True)
class Queues:
    """Work in queues. Positions number all work; queue q runs first[q] .. last[q] - 1 in this order."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    server: NDArray[np.int64]  # of each queue
    needs: Ints  # [positions, maximum number of needs]: the positions to wait for; negative: none
    duration: Floats  # the time for which the server is busy
    lag: Floats  # from the end until others see the result


@dataclass(frozen=True)
class Run:
    """When each position started and became visible to others (NaN: never ran), and where each queue stopped."""

    start: Floats
    seen: Floats
    stopped_at: NDArray[np.int64]
    is_done: bool


def advance(queues: Queues) -> Run:
    """Run the queues until all are done or none can continue."""
    return _Rounds(queues).run()


class _Rounds:
    """The state of the queues between rounds. A round looks only at queues that moved or stopped waiting."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        num = len(queues.duration)
        self.start = np.full(num, np.nan)
        self.seen = np.full(num + 1, np.inf)  # the last entry means "nothing to wait for"
        self.seen[num] = 0.0
        self.needs = np.where(queues.needs < 0, num, queues.needs)
        self.cursor = queues.first.copy()
        self.free = np.zeros(int(queues.server.max(initial=-1)) + 1)
        # the queues that wait for a position, as a linked list: its first queue, then the next of each queue
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
        """Advance the queues that can move; return those that moved or waited for them, for the next round."""
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
        """Add queues to the lists of waiters. If several wait for one position, one is added and the rest try again."""
        while queue.size:
            self.next_waiter[queue] = self.first_waiter[position]
            self.first_waiter[position] = queue
            lost = self.first_waiter[position] != queue
            queue, position = queue[lost], position[lost]
