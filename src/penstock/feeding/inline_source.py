"""Inline: parcels that the user's own thread brings, each when it is asked for.

A thread that pulls shares Python's lock with the one that launches work. Where pulling takes next to no time, as from
memory or from worker processes, handing the lock to and fro can cost more than the pulling. The copy to a GPU goes
on beside what the GPU does, as with a thread. Nothing is pulled before it is asked for, so a loader that waits for what
the loop does with the last batch gets it. Where pulling turns out to take longer, a thread can go on from there, or in
the next epoch.
"""

from __future__ import annotations

import threading
import time
import types
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from penstock.devices.streams import Event
from penstock.feeding.item_carrier import Parcel
from penstock.feeding.loader_thread import Channel, End, Failure, Job, brought, start

__all__ = ["Inline"]

_SLOW_SECONDS = 1e-3  # a pull beside the loop costs the loop about half as much in waits for Python's lock
_NUM_SLOW = 3  # in a row: the first two may be slow because the loader starts, and pinned memory is made


class Inline:
    """Parcels that are brought when they are asked for; used as a channel is.

    Args:
        job: what to bring.
        ahead: how many the host may be ahead of the GPU.
        gives_way: to a thread, where pulling takes long.
    """

    def __init__(self, job: Job, ahead: int, *, gives_way: bool = False) -> None:
        self._job, self._ahead, self._gives_way = job, ahead, gives_way
        self._brought = brought(job)
        self._used: deque[Sequence[Event]] = deque()
        self._num_put, self._num_slow, self._is_over = 0, 0, False
        self._pulling = threading.RLock()  # a loader does one thing at a time, whatever threads there are
        self.is_closed = False

    def take(self, used: Sequence[Event] | None) -> Parcel | End | Failure | None:
        """Return the next parcel; None when it was closed.

        Args:
            used: behind the use of the one before; None for the first.
        """
        with self._pulling:
            return self._take(used)

    def _take(self, used: Sequence[Event] | None) -> Parcel | End | Failure | None:
        if self.is_closed:
            return None
        if used is not None:
            self._used.append(used)
        if self._num_put > self._ahead:  # else a host that runs far ahead would fill the GPU's memory
            for event in self._used.popleft():
                event.synchronize()
        found: Parcel | End | Failure
        try:
            begin = time.perf_counter()
            self._job.carrier.settle()  # from now on the loader may write to what it gave last
            pair = next(self._brought, None)
            self._num_slow = self._num_slow + 1 if time.perf_counter() - begin > _SLOW_SECONDS else 0
            found = End(self._job.state()) if pair is None else self._job.carrier.send(*pair)
        except Exception as error:  # is raised where the user asks for this item
            found = Failure(error)
        except BaseException:  # Ctrl-C: the loader was left in the middle, so this epoch has no end
            self.is_closed = True
            raise
        if self.is_closed:  # meanwhile, by another thread
            self._brought.close()
            return None
        self._is_over = not isinstance(found, Parcel)
        self._num_put += 1
        return found

    @property
    def is_slow(self) -> bool:
        """A thread should pull from now on."""
        return self._gives_way and self._num_slow >= _NUM_SLOW

    @property
    def can_hand_over(self) -> bool:
        """A thread can go on from here: a generator cannot, whose code may belong to the thread that it is in."""
        return not self._is_over and not self.is_closed and types.GeneratorType not in self._job.iterated

    def hand_over(self) -> tuple[Channel, threading.Thread]:
        """Let a thread go on: return where its parcels come from, and the thread. This one is not used any more."""
        self._job.carrier.settle()
        channel = Channel(self._ahead, self._used, self._num_put)
        return channel, start(self._job, channel, self._brought)

    def leave(self) -> None:
        """Wait until no other thread is in the loader."""
        with self._pulling:
            pass

    def close(self) -> None:
        """Let go of the loader."""
        self.is_closed = True
        self._used.clear()
        with suppress(ValueError):  # another thread is in the loader, and lets go of it when it comes back
            self._brought.close()
