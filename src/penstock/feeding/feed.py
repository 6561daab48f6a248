"""feed: the batches of any loader, on the lanes' devices before they are asked for; it can be saved and resumed."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from penstock.devices.streams import Event, current_stream
from penstock.errors import UsageError
from penstock.feeding.inline_source import Inline
from penstock.feeding.item_carrier import Carrier, Parcel, Split
from penstock.feeding.loader_random_state import check_draws, draws_of, own_draws_of, set_own
from penstock.feeding.loader_thread import Channel, End, Failure, Job, Pulls, end, start
from penstock.feeding.pinned_staging import mark
from penstock.feeding.sharded_loaders import check_not_sharded
from penstock.feeding.tensor_destinations import Places, places_of, places_on
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.planned.placement import check_devices

__all__ = ["Feed", "feed"]

Wanted = bool | Literal["auto"]

_MOST_AHEAD = 1 << 16


def feed(
    loader: Iterable[Any], pipe: Pipeline | None = None, *, ahead: int = 2,
    device: torch.device | str | int | None = None, split: Split | None = None, thread: Wanted = "auto",
) -> Feed:  # fmt: skip
    """Return the batches of a loader, on their way to the devices of the lanes that use them.

    >>> from torch import nn
    >>> model, loader = nn.Linear(4, 1), [(torch.ones(6, 4), torch.zeros(6, 1))] * 3
    >>> with Pipeline(model, example=loader[0][0], loss=nn.MSELoss(), lanes=1, micro_batches=2) as pipe:
    ...     losses = [pipe.step(batch, target) for batch, target in feed(loader, pipe)]
    >>> len(losses)
    3

    Args:
        loader: a DataLoader, or whatever can be iterated over; each time anew, for more than one epoch.
        pipe: the pipeline that takes the batches.
        ahead: batches to have ready beside the one that is used, or in use by the GPU behind it.
        device: where batches go, instead of a pipeline's devices.
        split: from a loader's item to (batch, target), where the item is neither that nor a batch alone.
        thread: pull in a thread beside the loop, ahead of it; False: within the loop, when it asks for a batch. That
            can be better where a loader answers at once and steps are short, for threads share Python's lock. "auto":
            within the loop, until three batches in a row take longer than a millisecond; then in a thread. Loaders
            that are written as generators have a thread from the start, for they cannot change it.

    Raises:
        UsageError: for arguments that cannot be right; for a loader that gives each process a share of the data, where
            lanes are processes.
    """
    faults = list(_faults(loader, pipe, ahead, device, split))
    if thread not in (True, False, "auto"):
        faults.append(f"thread: must be True, False or 'auto'; given: {thread!r:.40}")
    if faults:
        raise UsageError("; ".join(faults))
    if pipe is not None:
        check_not_sharded(loader, pipe, "loader")
        places = places_of(pipe, is_split=split is not None)
    else:
        places = places_on(_checked_device(device))
    return Feed(loader, places, ahead=int(ahead), split=split, thread=thread if thread == "auto" else bool(thread))


def _faults(loader: object, pipe: object, ahead: object, device: object, split: object) -> Iterator[str]:
    if isinstance(loader, type) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        yield f"loader: give a DataLoader, or whatever can be iterated over; given: {loader!r:.60}"
    if pipe is not None and not isinstance(pipe, Pipeline):
        yield f"pipe: give a penstock.Pipeline, or device= without one; given: {type(pipe).__name__}"
    elif (pipe is None) == (device is None):
        what = "neither" if pipe is None else "both"
        yield f"pipe, device: give the pipeline that takes the batches, or the device that they go to; given: {what}"
    if isinstance(ahead, bool) or not isinstance(ahead, Integral) or not 1 <= int(ahead) <= _MOST_AHEAD:
        yield f"ahead: must be a whole number of batches, 1 or more; given: {ahead!r}"
    if split is not None and not callable(split):
        yield f"split: give a function from an item to (batch, target); given: {type(split).__name__}"


def _checked_device(device: Any) -> torch.device:  # noqa: ANN401 - what the user gave
    try:
        (found,) = check_devices([device], 1)
    except UsageError as error:
        raise UsageError(str(error).replace("devices:", "device:")) from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device: batches go to CUDA devices, or stay on the CPU; given: {found}")
    return found


class Feed:
    """Batches of a loader, an epoch each time it is iterated over.

    An iteration ends with its loop, however that ends: its thread is stopped, and what was pulled too early is dropped.

    Args:
        loader: whatever can be iterated over.
        places: where tensors go.
        ahead: batches to have ready.
        split: from an item to (batch, target).
        thread: pull in a thread; "auto": when pulling takes long.
    """

    def __init__(
        self, loader: Iterable[Any], places: Places, *, ahead: int, split: Split | None, thread: Wanted = True
    ) -> None:
        self._loader, self._ahead, self._wants_thread = loader, ahead, thread
        self._carrier = Carrier(places, split)
        self._has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._epoch, self._num_given = 0, 0
        self._num_skipped = 0  # of the next epoch, by a state that was loaded
        self._num_pulled: int | None = None  # of the next epoch too, where the loader has generators of its own
        self._pulls: Pulls | None = None  # of the epoch under way, where it has
        self._draws: Mapping[str, Any] | None = (
            None  # what the epoch's order was drawn from, without a loader's own state
        )
        self._is_open = False  # an epoch was begun, and has not come to its end
        self._loader_state: Any = None  # as of the batches that were handed out
        self._current: weakref.ref[_Epoch] | None = None
        self._thread: threading.Thread | None = None  # of the last iteration; it may still be in the loader
        self._inline: Inline | None = None  # of the last iteration, where it has no thread
        self._passed = [0]  # items that the last iteration has passed over, its only number

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without one says so itself

    @property
    def epoch(self) -> int:
        """The number of the epoch that is under way, or else of the next; they count from 0."""
        return self._epoch

    @property
    def num_passed(self) -> int:
        """How many items were passed over so far, at the beginning of an epoch that goes on from a state."""
        return self._passed[0]

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that pulls, where there is one."""
        return self._thread

    # ---- what epochs say

    def _begin(self, epoch: _Epoch) -> tuple[Channel | Inline, threading.Thread | None]:
        """Begin an epoch: return where its batches come from, and the thread that brings them, if one does."""
        self._stop(is_replaced=True)
        self._leave_loader()
        if self._is_open:  # the one before was broken off
            self._epoch, self._num_given, self._loader_state = self._epoch + 1, 0, None
        skipped, self._num_skipped = self._num_skipped, 0
        for sampler in _samplers_of(self._loader):
            sampler.set_epoch(self._epoch)
        again, pulled = (self._draws, self._num_pulled) if skipped else (None, None)
        self._num_pulled = None
        if again is None:
            self._draws = None if self._has_state else draws_of(self._loader)
        self._is_open, self._current = True, weakref.ref(epoch)
        has_own = not self._has_state and bool(own_draws_of(self._loader)["own"])
        self._pulls = Pulls(self._loader, max(skipped, pulled or 0)) if has_own else None
        job = Job(
            self._loader, self._carrier, skipped, draws=again, num_pulled=pulled, takes_state=self._has_state,
            pulls=self._pulls,
        )  # fmt: skip
        self._thread, self._passed = None, job.passed
        if self._wants_thread == "auto" and _is_generator(self._loader):
            self._wants_thread = True
        if self._wants_thread is not True:
            self._inline = Inline(job, self._ahead, gives_way=self._wants_thread == "auto")
            return self._inline, None
        channel = Channel(self._ahead)
        self._thread = start(job, channel)
        return channel, self._thread

    def _give_way(self, inline: Inline) -> tuple[Channel, threading.Thread] | None:
        """Let a thread bring all epochs to come, and go on with this one, if it can."""
        self._wants_thread = True
        if not inline.can_hand_over:
            return None
        channel, self._thread = inline.hand_over()
        return channel, self._thread

    def _mark(self) -> list[Event]:
        """Return events behind all that the caller's streams have been given."""
        return [mark(current_stream(device)) for device in self._carrier.devices]

    def _note(self, state: Any) -> None:  # noqa: ANN401 - the loader's
        """Note that a batch is handed out."""
        self._num_given, self._loader_state = self._num_given + 1, state

    def _finish(self, state: Any) -> None:  # noqa: ANN401 - the loader's
        """Note that the epoch has come to its end."""
        self._epoch, self._num_given, self._loader_state, self._is_open = self._epoch + 1, 0, state, False

    # ---- saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return where the user is, whatever was pulled ahead: the epoch, and the batches of it that were handed out.

        Of a loader that has a state of its own, as torchdata's StatefulDataLoader, also that, as it was then; within an
        epoch of any other, the random states that its order was drawn from, and where generators that it was given are
        now.
        """
        state = self._loader_state
        if self._has_state and state is None:
            state = self._loader.state_dict()  # type: ignore[attr-defined]
        found = {"epoch": self._epoch, "batches": self._num_given, "loader": state}
        if self._has_state:
            return found
        if not self._num_given or self._draws is None:
            between = own_draws_of(self._loader)
            return found | {"draws": between} if between["own"] else found
        found["draws"] = self._draws
        if self._num_skipped:  # a state that was loaded, and not gone on with yet
            if self._num_pulled is not None:
                found |= {"pulled": self._num_pulled, "now": own_draws_of(self._loader)}
        elif self._pulls is not None:
            found["pulled"], found["now"] = self._pulls.now()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, in the next iteration, behind the batches that had been handed out.

        A loader with a state of its own gets it back; of others so many batches are pulled and passed over, in
        the order that the epoch had.

        Raises:
            UsageError: when it is no state of a feed, or of another loader; then nothing has changed.
        """
        self._check(state)
        loaders = state.get("loader")
        self._stop()
        self._leave_loader()
        if loaders is not None:
            self._loader.load_state_dict(loaders)  # type: ignore[attr-defined]
        self._epoch, self._num_given = state["epoch"], state["batches"]
        self._num_skipped, self._draws = self._num_given if loaders is None else 0, state.get("draws")
        self._num_pulled, self._pulls = state.get("pulled"), None
        now = state.get("now") if self._num_given else self._draws
        if now is not None:
            set_own(self._loader, now)
        self._loader_state, self._is_open = loaders, False

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise where a state cannot be gone on with; nothing is changed."""
        numbers = [state.get(key) if isinstance(state, Mapping) else None for key in ("epoch", "batches")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise UsageError(f"state: give what state_dict() of a feed returned; given: {state!r:.80}")
        loaders = state.get("loader")
        if loaders is not None and not self._has_state:
            raise UsageError("state: it holds that of a loader which has load_state_dict(), and this loader has none")
        given, length = state["batches"], _length_of(self._loader)
        if loaders is None and length is not None and given > length:
            raise UsageError(f"the state is of an epoch of {given} batches or more; the loader has {length}")
        if state.get("draws") is not None:
            check_draws(self._loader, state["draws"], is_own_only=not given)
        if state.get("now") is not None:
            check_draws(self._loader, state["now"], is_own_only=True)
        pulled = state.get("pulled", given)
        if not isinstance(pulled, int) or (pulled != given and "now" not in state):
            raise UsageError(f"state: give what state_dict() of a feed returned; pulled: {pulled!r:.40}")

    # ---- ending

    def _stop(self, *, is_replaced: bool = False) -> None:
        """End the iteration that is under way."""
        current = None if self._current is None else self._current()
        if current is not None:
            current.is_replaced = is_replaced and not current.is_over
            current.close()

    def _leave_loader(self) -> None:
        """Wait, however long, for whoever is still in the loader: that does one thing at a time."""
        if self._thread is not None:
            self._thread.join()
        if self._inline is not None:
            self._inline.leave()

    def close(self) -> None:
        """End the iteration that is under way and free the staging memory; iterating again begins a new epoch."""
        self._stop()
        self._carrier.clear()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Feed({type(self._loader).__name__}, ahead={self._ahead}, epoch={self._epoch})"


class _Epoch:
    """One iteration over a feed. The worker does not know it, so that it ends when nobody holds it any more.

    Attributes:
        is_over: nothing more comes.
        is_replaced: because another iteration was begun.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._channel: Channel | Inline | None = None
        self._end: weakref.finalize[..., _Epoch] | None = None
        self.is_over = self.is_replaced = False

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - as the loader's item
        if self.is_over:
            if self.is_replaced:
                raise UsageError("another iteration over the feed was begun, and a loader gives one epoch at a time")
            raise StopIteration
        used = None if self._channel is None else self._feed._mark()
        channel = self._begun()
        found = channel.take(used)
        if isinstance(channel, Inline) and channel.is_slow and (other := self._feed._give_way(channel)) is not None:
            self._fetch_from(*other)
        if isinstance(found, Parcel):
            self._feed._note(found.state)
            return found.receive()
        self.close()
        if isinstance(found, End):
            self._feed._finish(found.state)
        if isinstance(found, Failure):
            try:
                raise found.error
            finally:
                del found  # the error would hold its own traceback
        raise StopIteration

    def _begun(self) -> Channel | Inline:
        """Return where batches come from; the worker starts when the first is asked for.

        The user waits for that one, so all that a loader draws of random numbers when it starts comes before what the
        user draws for the first step, as without a feed.
        """
        if self._channel is None:
            self._fetch_from(*self._feed._begin(self))
        assert self._channel is not None
        return self._channel

    def _fetch_from(self, channel: Channel | Inline, thread: threading.Thread | None) -> None:
        if self._end is not None:
            self._end.detach()
        self._channel, self._end = channel, weakref.finalize(self, end, channel, thread)
        if self.is_over:  # it was closed meanwhile, by another thread
            self._end()

    def close(self) -> None:
        """End it: its thread, and what is on its way."""
        self.is_over = True
        if self._end is not None:
            self._end()


def _length_of(loader: object) -> int | None:
    """Return the batches of an epoch, where a loader knows them."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # which may have more than it says
        return None
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_generator(loader: object) -> bool:
    """Return whether a loader is a generator, or gives one when it is iterated over."""
    return inspect.isgenerator(loader) or inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None))


def _samplers_of(loader: object) -> list[Any]:
    """Return what a loader draws its order from and wants to know the epoch, as torch's DistributedSampler."""
    inside = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), inside, getattr(inside, "sampler", None))
    return list({id(sampler): sampler for sampler in found if callable(getattr(sampler, "set_epoch", None))}.values())
