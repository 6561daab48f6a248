"""Advance: run queues of actions until all are done or none can go on.

A queue is an ordered run of positions: a lane's compute, or what one lane sends to another. The head of
a queue starts when all that it waits for is there and its server is free. Every lane and every private
link is a server of its own; channels that share a link share a server, which takes whoever was ready
first. `verify` runs this without a clock (all durations zero), `simulate` with one.

Each round moves every queue that can move by one place, all queues at once. Heads on shared servers are
held back until nothing else can move. Then whatever comes later is ready no earlier than the earliest
head held now, so that one may go: the result is that of an event loop ordered by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import Ints

__all__ = ["Queues", "Run", "advance"]

Floats = NDArray[np.float64]


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
    num = len(queues.duration)
    start = np.full(num, np.nan)
    seen = np.full(num + 1, np.inf)  # the last entry stands for "nothing to wait for"
    seen[num] = 0.0
    needs = np.where(queues.needs < 0, num, queues.needs)
    cursor = queues.first.copy()
    free = np.zeros(int(queues.server.max()) + 1 if len(queues.server) else 0)
    shares = np.bincount(queues.server, minlength=len(free)) > 1
    private = np.flatnonzero(~shares[queues.server] & (cursor < queues.last))
    shared = np.flatnonzero(shares[queues.server] & (cursor < queues.last))

    def run(queue: NDArray[np.int64], at: NDArray[np.int64], ready: Floats) -> None:
        server = queues.server[queue]
        begin = np.maximum(ready, free[server])
        end = begin + queues.duration[at]
        start[at], free[server], seen[at] = begin, end, end + queues.lag[at]
        cursor[queue] = at + 1

    while True:
        at = cursor[private]
        ready = seen[needs[at]].max(axis=1)
        can = np.flatnonzero(ready < np.inf)
        if can.size:
            run(private[can], at[can], ready[can])
            if (cursor[private] == queues.last[private]).any():
                private = private[cursor[private] < queues.last[private]]
            continue
        shared = shared[cursor[shared] < queues.last[shared]]
        at = cursor[shared]
        ready = seen[needs[at]].max(axis=1)
        if not shared.size or not np.isfinite(ready).any():
            break
        first = np.argmin(ready)
        run(shared[first : first + 1], at[first : first + 1], ready[first : first + 1])
    return Run(start, np.where(np.isinf(seen[:num]), np.nan, seen[:num]), cursor, bool((cursor == queues.last).all()))
