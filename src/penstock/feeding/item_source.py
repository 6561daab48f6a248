"""Item source: read a loader's items, in a thread ahead of the user, or in the user's own thread.

                    ┌── room for `ahead` items ────┐
    worker ── put ──►   item    item    item        ├── take ──► user
           ◄──────── event after the use of each ◄─────────┘

An item is copied to a GPU when the channel has a free place and the GPU has finished with the item `ahead + 1` before
it. So a host that runs far ahead of the GPU does not fill its memory.
"""

from __future__ import annotations

import copy
import threading
import time
import types
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from penstock.devices import cuda
from penstock.devices.cuda_streams import Event
from penstock.devices.sanitizer import sanitized
from penstock.errors import UsageError
from penstock.feeding.item_carrier import Carrier, SentItem, StagedItem
from penstock.feeding.loader_random_state import own_draws_of, restored_draws

_GRACE_SECONDS = 4.0  # wait this long for a worker that is in the loader
_SLOW_SECONDS = 1e-3  # a pull in a thread costs the loop about half its time in waits for Python's lock
_NUM_SLOW = 3  # in a row; the first two may be slow because the loader starts and pinned memory is allocated


@dataclass(frozen=True)
class End:
    """The end of the loader's items; `state` is the loader's state after it."""

    state: Any = None


@dataclass(frozen=True)
class Failure:
    """An exception of the loader, or of the preparation of an item."""

    error: BaseException


class Channel:
    """A bounded queue of items that were sent.

    Args:
        ahead: the maximum number of items.
        used: events after the use of earlier items, as far as nobody has waited for them.
        num_put: the number of items put so far.
    """

    def __init__(self, ahead: int, used: Iterable[Sequence[Event]] = (), num_put: int = 0) -> None:
        self._ahead = ahead
        self._changed = threading.Condition()
        self._items: deque[SentItem | End | Failure] = deque()
        self._used: deque[Sequence[Event]] = deque(used)
        self._num_put = num_put
        self.is_closed = False

    def wait_for_space(self) -> bool:
        """Wait until another item may be sent; return False if the channel was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or len(self._items) < self._ahead)
            if self.is_closed:
                return False
            # the user has taken all earlier items except the last `ahead`, so this event exists
            used = self._used.popleft() if self._num_put > self._ahead else ()
        for event in used:
            event.synchronize()
        return True

    def put(self, item: SentItem | End | Failure) -> None:
        """Add an item."""
        with self._changed:
            if not self.is_closed:
                self._items.append(item)
                self._num_put += 1
                self._changed.notify_all()

    def take(self, used: Sequence[Event] | None) -> SentItem | End | Failure | None:
        """Wait for the next item and return it; None if the channel was closed.

        Args:
            used: events after the use of the last item; None for the first.
        """
        with self._changed:
            if used is not None:
                self._used.append(used)
            self._changed.wait_for(lambda: self.is_closed or self._items)
            if self.is_closed:
                return None
            self._changed.notify_all()
            return self._items.popleft()

    def close(self) -> None:
        """Drop all items and refuse new ones."""
        with self._changed:
            self.is_closed = True
            self._items.clear()
            self._used.clear()
            self._changed.notify_all()


class PullCounter:
    """Counts the reads of a loader, together with the states of the loader's own generators at that point.

    A loader draws when it is read, and it is read ahead of the user. To resume from a state, read the loader the same
    number of times first, and then set its generators to their states.
    """

    def __init__(self, loader: Iterable[Any], count: int = 0) -> None:
        self._loader, self._count = loader, count
        self._pulling = threading.Lock()
        self._before = (count, own_draws_of(loader))

    def counted(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield the loader's items."""
        while True:
            with self._pulling:
                self._before = self._count, own_draws_of(self._loader)
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._count += 1
            yield item
            del item  # otherwise it would live until the next item is ready

    def now(self) -> tuple[int, dict[str, Any]]:
        """Return the number of reads and the states of the loader's own generators."""
        count, before = self._before
        own = own_draws_of(self._loader)
        if own == before:  # nothing was drawn since, so reads since then do not matter
            return count, own
        is_free = self._pulling.acquire(timeout=_GRACE_SECONDS)
        try:
            return self._count, own_draws_of(self._loader)
        finally:
            if is_free:
                self._pulling.release()


@dataclass(frozen=True)
class Job:
    """The work of one epoch."""

    loader: Iterable[Any]
    carrier: Carrier
    num_skipped: int  # the number of items to skip first
    draws: Mapping[str, Any] | None  # the random states to start with, to repeat an earlier epoch's order
    num_pulled: int | None  # read this many items, then restore the current states of the loader's own generators
    takes_state: bool  # whether each item carries the loader's own state
    pulls: PullCounter | None  # counts the reads of the loader
    iterated: list[type] = field(default_factory=list)  # the type of the loader's iterator, once it exists
    passed: list[int] = field(default_factory=lambda: [0])  # one number: the items skipped so far

    def items(self) -> Iterator[Any]:
        """Return the items after the skipped ones."""
        with restored_draws(self.loader, self.draws, keeps_own=self.num_pulled is not None):
            iterator = iter(self.loader)
            self.iterated.append(type(iterator))
            count = sum(1 for _ in self._counted(islice(iterator, self.num_skipped)))
            ahead = deque(self._counted(islice(iterator, max(0, (self.num_pulled or 0) - self.num_skipped))))
        if count < self.num_skipped:
            raise UsageError(
                f"the state is from an epoch of {self.num_skipped} batches or more; the loader has {count}"
            )
        rest = iterator if self.pulls is None else self.pulls.counted(iterator)
        return chain((ahead.popleft() for _ in range(len(ahead))), rest) if ahead else rest

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.passed[0] += 1
            yield item

    def state(self) -> Any:  # noqa: ANN401 - the loader's own
        """Return a copy of the loader's current state."""
        return copy.deepcopy(self.loader.state_dict()) if self.takes_state else None  # type: ignore[attr-defined]


def staged_items(job: Job) -> Generator[tuple[StagedItem, Any], None, None]:
    """Yield the items of an epoch, ready to send, each with the loader's state after it."""
    for item in job.items():
        try:
            pair = job.carrier.stage(item), job.state()
        except StopIteration as error:  # it would silently end the user's loop
            raise RuntimeError("the preparation of an item raised StopIteration") from error
        del item  # otherwise it would live until the next item is ready
        yield pair
        del pair


def start_worker(job: Job, channel: Channel, pairs: Iterator[tuple[StagedItem, Any]] | None = None) -> threading.Thread:
    """Start the worker for one epoch, or for the rest of one."""
    # the loader runs with the user's current device
    on_device: AbstractContextManager[Any] = nullcontext()
    if job.carrier.devices:
        on_device = cuda.on_gpu(cuda.current_gpu())
    # a daemon: a loader that never returns must not keep the process alive
    pairs = staged_items(job) if pairs is None else pairs
    thread = threading.Thread(target=_work, args=(job, channel, on_device, pairs), name="penstock-feed", daemon=True)
    thread.start()
    return thread


def end_worker(channel: Channel | InlineSource, thread: threading.Thread | None) -> None:
    """End the worker of an epoch; do not wait long for a loader that does not return."""
    channel.close()
    if thread not in (None, threading.current_thread()):  # garbage collection may run in any thread
        thread.join(_GRACE_SECONDS)


def _work(
    job: Job, channel: Channel, on_device: AbstractContextManager[Any], pairs: Iterator[tuple[StagedItem, Any]]
) -> None:
    """Send items until there are no more, an error occurs, or the channel is closed."""
    try:
        with on_device, sanitized():
            for pair in pairs:
                if not channel.wait_for_space():
                    return
                channel.put(job.carrier.send(*pair))
                job.carrier.staging.wait_for_sources()
                del pair
            channel.put(End(job.state()))
    except BaseException as error:  # raised in the user's loop, in place of this item
        channel.put(Failure(error))


class InlineSource:
    """Items that the user's own thread reads, each when it is requested; has the interface of a Channel.

    A thread that reads ahead shares Python's lock with the thread that launches work. If reading is quick (from memory,
    or from worker processes), passing the lock back and forth can cost more than reading. The copy to a GPU still runs
    beside the GPU's work. Nothing is read before it is requested, so a loader that waits for a result of the last batch
    works. If reading turns out to be slow, a thread can take over, now or in the next epoch.

    Args:
        job: the work of the epoch.
        ahead: the number of items that the host may be ahead of the GPU.
        may_hand_over: whether a thread may take over if reading is slow.
    """

    def __init__(self, job: Job, ahead: int, *, may_hand_over: bool) -> None:
        self._job, self._ahead, self._may_hand_over = job, ahead, may_hand_over
        self._items = staged_items(job)
        self._used: deque[Sequence[Event]] = deque()
        self._num_put, self._num_slow, self._is_over = 0, 0, False
        self._pulling = threading.RLock()  # only one thread may be in the loader
        self.is_closed = False

    def take(self, used: Sequence[Event] | None) -> SentItem | End | Failure | None:
        """Return the next item, as `Channel.take` does."""
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
            self._job.carrier.staging.wait_for_sources()  # from now on the loader may overwrite its last item
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
        self._job.carrier.staging.wait_for_sources()
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
