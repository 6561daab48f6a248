"""InlineSource source: items that the user's own thread reads from the loader, each when it is requested.

A thread that reads ahead shares Python's lock with the thread that launches work. If reading is quick (from memory, or
from worker processes), passing the lock back and forth can cost more than reading. The copy to a GPU still runs beside
the GPU's work. Nothing is read before it is requested, so a loader that waits for a result of the last batch works. If
reading turns out to be slow, a thread can take over, now or in the next epoch.
"""

from __future__ import annotations

import threading
import time
import types
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from penstock.devices.cuda_streams import Event
from penstock.feeding.item_carrier import SentItem
from penstock.feeding.loader_thread import Channel, End, Failure, Job, staged_items, start_worker

_SLOW_SECONDS = 1e-3  # a pull in a thread costs the loop about half its time in waits for Python's lock
_NUM_SLOW = 3  # in a row; the first two may be slow because the loader starts and pinned memory is allocated


class InlineSource:
    """Items that are read when they are requested; has the interface of a Channel.

    Args:
        job: the work of the epoch.
        ahead: the number of items that the host may be ahead of the GPU.
        may_hand_over: whether a thread may take over if reading is slow.
    """

    def __init__(self, job: Job, ahead: int, *, may_hand_over: bool = False) -> None:
        self._job, self._ahead, self._may_hand_over = job, ahead, may_hand_over
        self._items = staged_items(job)
        self._used: deque[Sequence[Event]] = deque()
        self._num_put, self._num_slow, self._is_over = 0, 0, False
        self._pulling = threading.RLock()  # only one thread may be in the loader
        self.is_closed = False

    def take(self, used: Sequence[Event] | None) -> SentItem | End | Failure | None:
        """Return the next item; None if the source was closed.

        Args:
            used: events after the use of the last item; None for the first.
        """
        with self._pulling:
            return self._take(used)

    def _take(self, used: Sequence[Event] | None) -> SentItem | End | Failure | None:
        if self.is_closed:
            return None
        if used is not None:
            self._used.append(used)
        if self._num_put > self._ahead:  # otherwise a host far ahead would fill the GPU's memory
            for event in self._used.popleft():
                event.synchronize()
        found: SentItem | End | Failure
        try:
            begin = time.perf_counter()
            self._job.carrier.wait_for_sources()  # from now on the loader may overwrite its last item
            pair = next(self._items, None)
            self._num_slow = self._num_slow + 1 if time.perf_counter() - begin > _SLOW_SECONDS else 0
            found = End(self._job.state()) if pair is None else self._job.carrier.send(*pair)
        except Exception as error:  # raised in the user's loop, in place of this item
            found = Failure(error)
        except BaseException:  # Ctrl-C: the loader was interrupted, so this epoch cannot go on
            self.is_closed = True
            raise
        if self.is_closed:  # another thread has closed it meanwhile
            self._items.close()
            return None
        self._is_over = not isinstance(found, SentItem)
        self._num_put += 1
        return found

    @property
    def is_slow(self) -> bool:
        """Whether a thread should read the loader from now on."""
        return self._may_hand_over and self._num_slow >= _NUM_SLOW

    @property
    def can_hand_over(self) -> bool:
        """Whether a thread can take over: a generator's code may depend on the thread that it runs in."""
        return not self._is_over and not self.is_closed and types.GeneratorType not in self._job.iterated

    def hand_over(self) -> tuple[Channel, threading.Thread]:
        """Let a thread take over; return the new channel and the thread. This source is then no longer used."""
        self._job.carrier.wait_for_sources()
        channel = Channel(self._ahead, self._used, self._num_put)
        return channel, start_worker(self._job, channel, self._items)

    def wait_until_free(self) -> None:
        """Wait until no other thread is in the loader."""
        with self._pulling:
            pass

    def close(self) -> None:
        """Release the loader."""
        self.is_closed = True
        self._used.clear()
        with suppress(ValueError):  # another thread is in the loader, and releases it when the call returns
            self._items.close()
