"""Inline: parcels that the user's own thread brings, when it asks for the ones before.

A thread that pulls shares Python's lock with the one that launches work. Where pulling takes next to no time, as from
memory or from worker processes, handing the lock to and fro can cost more than the pulling itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.feeding.carrier import Parcel
from penstock.feeding.worker import End, Failure, Job, brought
from penstock.runtime.streams import Event

__all__ = ["Inline"]

_MOST_AT_ONCE = 2  # one for the one that is taken, and one more until as many are ready as are wanted


class Inline:
    """Parcels that were brought, a bounded number of them; used as a channel is.

    Args:
        job: what to bring.
        ahead: how many to have ready.
    """

    def __init__(self, job: Job, ahead: int) -> None:
        self._job, self._ahead = job, ahead
        self._brought = brought(job)
        self._parcels: deque[Parcel | End | Failure] = deque()
        self._used: deque[Sequence[Event]] = deque()
        self._num_put, self._is_over = 0, False
        self.is_closed = False

    def take(self, used: Sequence[Event] | None) -> Parcel | End | Failure | None:
        """Return the next parcel, and see to it that more are on their way; None when it was closed.

        Args:
            used: behind the use of the one before; None for the first.
        """
        if self.is_closed:
            return None
        if used is not None:
            self._used.append(used)
        if not self._parcels:
            self._bring(waits=True)
        for _ in range(_MOST_AT_ONCE):
            if len(self._parcels) <= self._ahead:  # the one that is taken now is among them
                self._bring(waits=False)
        return self._parcels.popleft()

    def _bring(self, *, waits: bool) -> None:
        """Bring one more, unless there are none, or the GPU is not done with the one whose memory it would have."""
        if self._is_over:
            return
        if self._num_put > self._ahead:
            if not waits and not all(event.query() for event in self._used[0]):  # type: ignore[no-untyped-call]
                return
            for event in self._used.popleft():
                event.synchronize()
        parcel: Parcel | End | Failure
        try:
            pair = next(self._brought, None)
            parcel = End(self._job.state()) if pair is None else self._job.carrier.send(*pair)
            if pair is not None:
                self._job.carrier.settle()
        except Exception as error:  # is raised where the user asks for this item
            parcel = Failure(error)
        self._is_over = not isinstance(parcel, Parcel)
        self._parcels.append(parcel)
        self._num_put += 1

    def close(self) -> None:
        """Let go of all parcels, and of the loader."""
        self.is_closed = True
        self._parcels.clear()
        self._used.clear()
        self._brought.close()
