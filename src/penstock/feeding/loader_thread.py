"""Worker: the thread that pulls items from a loader ahead of the user, and the channel between the two.

                    ┌── room for `ahead` parcels ──┐
    worker ── put ──►  parcel  parcel  parcel       ├── take ──► user
           ◄────────  event behind the use of each ◄──────────┘

A parcel is copied to a GPU when there is room for it, and when the GPU has done with the one `ahead + 1` before it. So
a user whose host runs far ahead of the GPU does not fill its memory.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch

from penstock.devices.sanitizer import sanitized
from penstock.devices.streams import Event
from penstock.errors import UsageError
from penstock.feeding.item_carrier import Carrier, Lifted, Parcel
from penstock.feeding.loader_random_state import as_at, own_draws_of

if TYPE_CHECKING:
    from penstock.feeding.inline_source import Inline

__all__ = ["Channel", "End", "Failure", "Job", "Pulls", "brought", "end", "start"]

_GRACE_SECONDS = 4.0  # for a worker that is in the loader to come back


@dataclass(frozen=True)
class End:
    """The loader has no more; `state` is its own after that."""

    state: Any = None


@dataclass(frozen=True)
class Failure:
    """The loader, or what was done with its item, raised."""

    error: BaseException


class Channel:
    """Parcels on their way, a bounded number of them.

    Args:
        ahead: how many.
        used: events behind the use of those before, as far as they were not waited for.
        num_put: how many have been handed over.
    """

    def __init__(self, ahead: int, used: Iterable[Sequence[Event]] = (), num_put: int = 0) -> None:
        self._ahead = ahead
        self._changed = threading.Condition()
        self._parcels: deque[Parcel | End | Failure] = deque()
        self._used: deque[Sequence[Event]] = deque(used)
        self._num_put = num_put
        self.is_closed = False

    def wait_for_room(self) -> bool:
        """Wait until one more may be sent; return False when nobody wants it."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or len(self._parcels) < self._ahead)
            if self.is_closed:
                return False
            # the user has asked for all but the last `ahead` of those before it, so this one's use has its event
            used = self._used.popleft() if self._num_put > self._ahead else ()
        for event in used:
            event.synchronize()
        return True

    def put(self, parcel: Parcel | End | Failure) -> None:
        """Hand over a parcel."""
        with self._changed:
            if not self.is_closed:
                self._parcels.append(parcel)
                self._num_put += 1
                self._changed.notify_all()

    def take(self, used: Sequence[Event] | None) -> Parcel | End | Failure | None:
        """Return the next parcel, when it is there; None when the channel was closed.

        Args:
            used: behind the use of the one before; None for the first.
        """
        with self._changed:
            if used is not None:
                self._used.append(used)
            self._changed.wait_for(lambda: self.is_closed or self._parcels)
            if self.is_closed:
                return None
            self._changed.notify_all()
            return self._parcels.popleft()

    def close(self) -> None:
        """Let go of all parcels; nobody wants more."""
        with self._changed:
            self.is_closed = True
            self._parcels.clear()
            self._used.clear()
            self._changed.notify_all()


class Pulls:
    """How often a worker has asked its loader, together with where the loader's own generators were then.

    A loader draws when it is asked, and is asked ahead of the user. So who goes on from a state must have asked it as
    often, before the generators are put where they were.
    """

    def __init__(self, loader: Iterable[Any], count: int = 0) -> None:
        self._loader, self._count = loader, count
        self._asking = threading.Lock()
        self._before = (count, own_draws_of(loader))

    def all_of(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield what a loader gives."""
        while True:
            with self._asking:
                self._before = self._count, own_draws_of(self._loader)
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._count += 1
            yield item
            del item  # else it lives as long as the next one takes

    def now(self) -> tuple[int, dict[str, Any]]:
        """Return how often the loader was asked, and the states of its own generators."""
        count, before = self._before
        own = own_draws_of(self._loader)
        if own == before:  # nothing was drawn since: whatever it was asked meanwhile does not matter
            return count, own
        is_free = self._asking.acquire(timeout=_GRACE_SECONDS)
        try:
            return self._count, own_draws_of(self._loader)
        finally:
            if is_free:
                self._asking.release()


@dataclass(frozen=True)
class Job:
    """What a worker does in one epoch.

    Attributes:
        loader: what to iterate over.
        carrier: brings items to where they are used.
        num_skipped: items to pass over first.
        draws: the generators' states that the loader starts from, where its order is to be that of an epoch before.
        num_pulled: items to ask the loader for before the generators are put where they were; None: they stay where
            the items that are passed over leave them.
        takes_state: the loader has a state of its own, which goes with each item.
        pulls: counts what the loader is asked for.
        iterated: the kind of iterator that the loader gave, when it has.
        passed: how many items were passed over so far, its only number.
    """

    loader: Iterable[Any]
    carrier: Carrier
    num_skipped: int = 0
    draws: Mapping[str, Any] | None = None
    num_pulled: int | None = None
    takes_state: bool = False
    pulls: Pulls | None = None
    iterated: list[type] = field(default_factory=list)
    passed: list[int] = field(default_factory=lambda: [0])

    def items(self) -> Iterator[Any]:
        """Return the items, but for those that are passed over."""
        with as_at(self.loader, self.draws, keeps_own=self.num_pulled is not None):
            iterator = iter(self.loader)
            self.iterated.append(type(iterator))
            count = sum(1 for _ in self._counted(islice(iterator, self.num_skipped)))
            ahead = deque(self._counted(islice(iterator, max(0, (self.num_pulled or 0) - self.num_skipped))))
        if count < self.num_skipped:
            raise UsageError(f"the state is of an epoch of {self.num_skipped} batches or more; the loader has {count}")
        rest = iterator if self.pulls is None else self.pulls.all_of(iterator)
        return chain((ahead.popleft() for _ in range(len(ahead))), rest) if ahead else rest

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.passed[0] += 1
            yield item

    def state(self) -> Any:  # noqa: ANN401 - the loader's own
        """Return the loader's state as it is now, whatever the loader does with it later."""
        return copy.deepcopy(self.loader.state_dict()) if self.takes_state else None  # type: ignore[attr-defined]


def brought(job: Job) -> Generator[tuple[Lifted, Any], None, None]:
    """Yield the items of an epoch as they can be sent, each with the loader's state after it."""
    for item in job.items():
        try:
            pair = job.carrier.lift(item), job.state()
        except StopIteration as error:  # it would end the user's loop without a word
            raise RuntimeError("StopIteration was raised by what was done with an item") from error
        del item  # else it lives as long as the next one takes
        yield pair
        del pair


def start(job: Job, channel: Channel, pairs: Iterator[tuple[Lifted, Any]] | None = None) -> threading.Thread:
    """Start the worker of one epoch, or of what is left of it."""
    # the loader finds the device that the user chose
    on_device: AbstractContextManager[Any] = nullcontext()
    if job.carrier.devices:
        on_device = torch.cuda.device(torch.cuda.current_device())
    # a daemon: a loader that never returns must not keep the process alive
    pairs = brought(job) if pairs is None else pairs
    thread = threading.Thread(target=_work, args=(job, channel, on_device, pairs), name="penstock-feed", daemon=True)
    thread.start()
    return thread


def end(channel: Channel | Inline, thread: threading.Thread | None) -> None:
    """End the worker of an epoch; one that is in a loader which does not return is left to itself after a while."""
    channel.close()
    if thread not in (None, threading.current_thread()):  # memory may be collected in any thread
        thread.join(_GRACE_SECONDS)


def _work(
    job: Job, channel: Channel, on_device: AbstractContextManager[Any], pairs: Iterator[tuple[Lifted, Any]]
) -> None:
    """Bring items until there are no more, something fails, or nobody wants them."""
    try:
        with on_device, sanitized():
            for pair in pairs:
                if not _deliver(job.carrier, channel, *pair):
                    return
                del pair
            channel.put(End(job.state()))
    except BaseException as error:  # is raised where the user asks for this item
        channel.put(Failure(error))


def _deliver(carrier: Carrier, channel: Channel, lifted: Lifted, state: Any) -> bool:  # noqa: ANN401 - the loader's
    """Send an item when there is room for it; return False when nobody wants it."""
    if not channel.wait_for_room():
        return False
    channel.put(carrier.send(lifted, state))
    carrier.settle()
    return True
