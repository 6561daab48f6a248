"""Feed: send a loader's batches to the lanes' devices before the steps need them; save and resume the position."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import Event, current_stream
from penstock.errors import UsageError
from penstock.feeding.item_carrier import Carrier, Destinations, SentItem, Split, destinations_of
from penstock.feeding.item_source import Channel, End, Failure, InlineSource, Job, PullCounter, end_worker, start_worker
from penstock.feeding.loader_random_state import check_draws, draws_of, own_draws_of, set_own_draws
from penstock.feeding.sharded_loaders import check_not_sharded
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.planned.placement import check_devices

ThreadOption = bool | Literal["auto"]

_MOST_AHEAD = 1 << 16


def feed(
    loader: Iterable[Any], pipe: Pipeline | None = None, *, ahead: int = 2,
    device: torch.device | str | int | None = None, split: Split | None = None, thread: ThreadOption = "auto",
) -> Feed:  # fmt: skip
    """Return a feed: a loader's batches on the devices of the lanes that use them.

    >>> from torch import nn
    >>> model, loader = nn.Linear(4, 1), [(torch.ones(6, 4), torch.zeros(6, 1))] * 3
    >>> with Pipeline(model, example=loader[0][0], loss=nn.MSELoss(), lanes=1, micro_batches=2) as pipe:
    ...     losses = [pipe.step(batch, target) for batch, target in feed(loader, pipe)]
    >>> len(losses)
    3

    Args:
        loader: a DataLoader or any other iterable; each epoch iterates over it again.
        pipe: the pipeline that uses the batches.
        ahead: the number of batches to prepare in advance.
        device: the device to send batches to, if there is no pipeline.
        split: a function from a loader's item to (batch, target), for items that are neither a batch nor such a pair.
        thread: True: a thread reads the loader ahead of your loop. False: your loop reads the loader when it needs a
            batch; this can be faster if the loader is quick and steps are short, because threads share Python's lock.
            "auto": start without a thread, and switch to one after three batches in a row took longer than a
            millisecond. Generators get a thread from the start, because they cannot change threads later.

    Raises:
        UsageError: for invalid arguments; if lanes are processes and the loader gives each process different batches.
    """
    faults = list(_faults(loader, pipe, ahead, device, split))
    if thread not in (True, False, "auto"):
        faults.append(f"thread: must be True, False or 'auto'; given: {thread!r:.40}")
    if faults:
        raise UsageError("; ".join(faults))
    if pipe is not None:
        check_not_sharded(loader, pipe, "loader")
        to = destinations_of(pipe, is_split=split is not None)
    else:
        to = _destinations_on(device)
    return Feed(loader, to, ahead=int(ahead), split=split, thread=thread if thread == "auto" else bool(thread))


def _faults(loader: object, pipe: object, ahead: object, device: object, split: object) -> Iterator[str]:
    if isinstance(loader, type) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        yield f"loader: expected a DataLoader or another iterable; given: {loader!r:.60}"
    if pipe is not None and not isinstance(pipe, Pipeline):
        yield f"pipe: expected a penstock.Pipeline; without a pipeline, pass device=; given: {type(pipe).__name__}"
    elif (pipe is None) == (device is None):
        what = "neither" if pipe is None else "both"
        yield f"pipe, device: pass either the pipeline that uses the batches, or their device; given: {what}"
    if isinstance(ahead, bool) or not isinstance(ahead, Integral) or not 1 <= int(ahead) <= _MOST_AHEAD:
        yield f"ahead: must be a whole number of at least 1; given: {ahead!r}"
    if split is not None and not callable(split):
        yield f"split: expected a function from an item to (batch, target); given: {type(split).__name__}"


def _destinations_on(device: Any) -> Destinations:  # noqa: ANN401 - any user argument
    """Return destinations that send everything to one device."""
    try:
        (found,) = check_devices([device], 1)
    except UsageError as error:
        raise UsageError(str(error).replace("devices:", "device:")) from None
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device: must be a CUDA device or the CPU; given: {found}")
    return Destinations((found,) if found.type == "cuda" else ())


class Feed:
    """The batches of a loader; each iteration is one epoch.

    When the loop ends, for any reason, its thread is stopped and batches that were read in advance are dropped.

    Args:
        loader: any iterable.
        to: the destination of each tensor.
        ahead: the number of batches to prepare in advance.
        split: a function from an item to (batch, target).
        thread: whether a thread reads the loader; "auto": only if reading is slow.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        to: Destinations,
        *,
        ahead: int,
        split: Split | None,
        thread: ThreadOption = True,
    ) -> None:
        self._loader, self._ahead, self._wants_thread = loader, ahead, thread
        self._carrier = Carrier(to, split)
        self._has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._epoch, self._num_given = 0, 0
        self._num_skipped = 0  # batches that the next epoch skips, after load_state_dict
        self._num_pulled: int | None = None  # the same for a loader with its own generators: items to pull
        self._pulls: PullCounter | None = None  # of the current epoch, if the loader has its own generators
        self._draws: Mapping[str, Any] | None = None  # random states at the start of the epoch
        self._is_open = False  # an epoch has begun and not ended
        self._loader_state: Any = None  # as of the last batch that was handed out
        self._current: weakref.ref[_Epoch] | None = None
        self._thread: threading.Thread | None = None  # of the last iteration; may still be in the loader
        self._inline: InlineSource | None = None  # of the last iteration, if it has no thread
        self._passed = [0]  # one number: the items that the last iteration skipped

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own error

    @property
    def epoch(self) -> int:
        """The number of the current epoch, or of the next one; it counts from 0."""
        return self._epoch

    @property
    def num_passed(self) -> int:
        """The number of items skipped so far in an epoch that resumes from a state."""
        return self._passed[0]

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that reads the loader, or None."""
        return self._thread

    # ---- called by an epoch

    def _begin(self, epoch: _Epoch) -> tuple[Channel | InlineSource, threading.Thread | None]:
        """Begin an epoch; return the source of its batches, and the thread that reads the loader, if any."""
        self._stop(is_replaced=True)
        self._wait_for_loader()
        if self._is_open:  # the last epoch was interrupted
            self._epoch, self._num_given, self._loader_state = self._epoch + 1, 0, None
        skipped, self._num_skipped = self._num_skipped, 0
        for sampler in _samplers_of(self._loader):
            sampler.set_epoch(self._epoch)
        draws, pulled = (self._draws, self._num_pulled) if skipped else (None, None)
        self._num_pulled = None
        if draws is None:
            self._draws = None if self._has_state else draws_of(self._loader)
        self._is_open, self._current = True, weakref.ref(epoch)
        has_own = not self._has_state and bool(own_draws_of(self._loader)["own"])
        self._pulls = PullCounter(self._loader, max(skipped, pulled or 0)) if has_own else None
        job = Job(self._loader, self._carrier, skipped, draws, pulled, self._has_state, self._pulls)
        self._thread, self._passed = None, job.passed
        if self._wants_thread == "auto" and _is_generator(self._loader):
            self._wants_thread = True
        if self._wants_thread is not True:
            self._inline = InlineSource(job, self._ahead, may_hand_over=self._wants_thread == "auto")
            return self._inline, None
        channel = Channel(self._ahead)
        self._thread = start_worker(job, channel)
        return channel, self._thread

    def _use_thread(self, inline: InlineSource) -> tuple[Channel, threading.Thread] | None:
        """Use a thread from the next epoch on, and for the rest of this one if possible."""
        self._wants_thread = True
        if not inline.can_hand_over:
            return None
        channel, self._thread = inline.hand_over()
        return channel, self._thread

    def _record_use(self) -> list[Event]:
        """Return events after all work that the caller's streams have so far."""
        return [blocking_event(current_stream(device)) for device in self._carrier.devices]

    def _count_batch(self, state: Any) -> None:  # noqa: ANN401 - the loader's
        """Count a batch that is handed out."""
        self._num_given, self._loader_state = self._num_given + 1, state

    def _finish(self, state: Any) -> None:  # noqa: ANN401 - the loader's
        """Record the end of the epoch."""
        self._epoch, self._num_given, self._loader_state, self._is_open = self._epoch + 1, 0, state, False

    # ---- saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data: the epoch, and the number of its batches that were handed out.

        Batches that were read in advance do not count. If the loader has its own state, as torchdata's
        StatefulDataLoader has, the result includes that state after the last handed-out batch. For other loaders, a
        state within an epoch includes the random states from which the order was drawn, and the current states of the
        loader's own generators.
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
        if self._num_skipped:  # a state was loaded, and the epoch has not started yet
            if self._num_pulled is not None:
                found |= {"pulled": self._num_pulled, "now": own_draws_of(self._loader)}
        elif self._pulls is not None:
            found["pulled"], found["now"] = self._pulls.now()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were handed out; takes effect in the next iteration.

        A loader with a state of its own restores it. With other loaders, the feed draws the same order again, and reads
        and skips that many batches.

        Raises:
            UsageError: for an invalid state, or the state of another loader; then nothing changes.
        """
        self._check(state)
        loader_state = state.get("loader")
        self._stop()
        self._wait_for_loader()
        if loader_state is not None:
            self._loader.load_state_dict(loader_state)  # type: ignore[attr-defined]
        self._epoch, self._num_given = state["epoch"], state["batches"]
        self._num_skipped, self._draws = self._num_given if loader_state is None else 0, state.get("draws")
        self._num_pulled, self._pulls = state.get("pulled"), None
        now = state.get("now") if self._num_given else self._draws
        if now is not None:
            set_own_draws(self._loader, now)
        self._loader_state, self._is_open = loader_state, False

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise if a state cannot be loaded; change nothing."""
        numbers = [state.get(key) if isinstance(state, Mapping) else None for key in ("epoch", "batches")]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise UsageError(f"state: expected the result of a feed's state_dict(); given: {state!r:.80}")
        loader_state = state.get("loader")
        if loader_state is not None and not self._has_state:
            raise UsageError("state: it contains a loader's state, but this loader has no load_state_dict()")
        given, length = state["batches"], _length_of(self._loader)
        if loader_state is None and length is not None and given > length:
            raise UsageError(f"the state is from an epoch of {given} batches or more; the loader has {length}")
        if state.get("draws") is not None:
            check_draws(self._loader, state["draws"], is_own_only=not given)
        if state.get("now") is not None:
            check_draws(self._loader, state["now"], is_own_only=True)
        pulled = state.get("pulled", given)
        if not isinstance(pulled, int) or (pulled != given and "now" not in state):
            raise UsageError(f"state: expected the result of a feed's state_dict(); pulled: {pulled!r:.40}")

    # ---- ending

    def _stop(self, *, is_replaced: bool = False) -> None:
        """End the current iteration."""
        current = None if self._current is None else self._current()
        if current is not None:
            current.is_replaced = is_replaced and not current.is_over
            current.close()

    def _wait_for_loader(self) -> None:
        """Wait, without a time limit, until no thread is in the loader: it does one thing at a time."""
        if self._thread is not None:
            self._thread.join()
        if self._inline is not None:
            self._inline.wait_until_free()

    def close(self) -> None:
        """End the current iteration and free the staging memory; another iteration starts a new epoch."""
        self._stop()
        self._carrier.staging.clear()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Feed({type(self._loader).__name__}, ahead={self._ahead}, epoch={self._epoch})"


class _Epoch:
    """One iteration over a feed. The worker holds no reference to it, so it ends when the user drops it."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._channel: Channel | InlineSource | None = None
        self._end: weakref.finalize[..., _Epoch] | None = None
        self.is_over = self.is_replaced = False  # replaced: it ended because another iteration began

    def __iter__(self) -> _Epoch:
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - as the loader's item
        if self.is_over:
            if self.is_replaced:
                raise UsageError("another iteration over the feed has begun, and a loader runs one epoch at a time")
            raise StopIteration
        used = None if self._channel is None else self._feed._record_use()
        channel = self._source()
        found = channel.take(used)
        if isinstance(channel, InlineSource) and channel.is_slow and (other := self._feed._use_thread(channel)):
            self._set_source(*other)
        if isinstance(found, SentItem):
            self._feed._count_batch(found.state)
            return found.receive()
        self.close()
        if isinstance(found, End):
            self._feed._finish(found.state)
        if isinstance(found, Failure):
            try:
                raise found.error
            finally:
                del found  # avoids a reference cycle between the error and its traceback
        raise StopIteration

    def _source(self) -> Channel | InlineSource:
        """Return the source of the batches; the first request starts the worker.

        The user waits for the first batch. So random numbers that the loader draws at its start come before those of
        the first step, as in a loop without a feed.
        """
        if self._channel is None:
            self._set_source(*self._feed._begin(self))
        assert self._channel is not None
        return self._channel

    def _set_source(self, channel: Channel | InlineSource, thread: threading.Thread | None) -> None:
        if self._end is not None:
            self._end.detach()
        self._channel, self._end = channel, weakref.finalize(self, end_worker, channel, thread)
        if self.is_over:  # another thread has closed it meanwhile
            self._end()

    def close(self) -> None:
        """End the iteration, its thread and its transfers."""
        self.is_over = True
        if self._end is not None:
            self._end()


def _length_of(loader: object) -> int | None:
    """Return the number of batches of an epoch, if the loader knows it."""
    if isinstance(getattr(loader, "dataset", None), IterableDataset):  # its length may be wrong
        return None
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _is_generator(loader: object) -> bool:
    """Return whether a loader is a generator, or returns one when it is iterated over."""
    return inspect.isgenerator(loader) or inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None))


def _samplers_of(loader: object) -> list[Any]:
    """Return the samplers of a loader that have `set_epoch`, such as torch's DistributedSampler."""
    inside = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), inside, getattr(inside, "sampler", None))
    return list({id(sampler): sampler for sampler in found if callable(getattr(sampler, "set_epoch", None))}.values())
