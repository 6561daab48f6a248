"""Data watch: if a data loader does not answer, the training ends with an error that names the loader."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.errors import HangError
from penstock.feeding.feed import Feed
from penstock.runtime.lanes.hang_report import stack_of_thread
from penstock.runtime.lanes.status_board import DATA, IDLE

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

# an otherwise unused signal, which interrupts the waiting thread
_SIGNAL = signal.SIGRTMAX - 4 if hasattr(signal, "SIGRTMAX") else 0
_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # time for the waiting thread to raise


class DataWatch:
    """Watches waits for data, in its own thread, while it is open.

    If a wait takes longer than the pipeline's timeout, the waiting thread raises a HangError and the other processes
    are notified. If the waiting code cannot be interrupted, `on_stuck` is called with the error.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        self._since: float | None = None  # when the wait began
        self._source: Iterable[Any] = ()
        self._error: HangError | None = None
        self._waiter = 0  # the thread that waits
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_signal = False
        self.on_stuck: Callable[[HangError], None] = _print_error

    def __enter__(self) -> DataWatch:
        self._closed.clear()
        self._since = self._error = None
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and _SIGNAL and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            signal.signal(_SIGNAL, self._raise)
            self._has_signal = True
        self._thread = threading.Thread(target=self._watch, name="penstock-data-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self._has_signal:
            signal.signal(_SIGNAL, signal.SIG_DFL)
            self._has_signal = False

    def watched(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of the data; raise a HangError if no item comes within the pipeline's timeout."""
        iterator: Iterator[Any] | None = None
        while True:
            self._begin(data)
            try:
                iterator = iter(data) if iterator is None else iterator
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._end()
            if self._error is not None:  # the other processes already know
                raise self._error
            yield item
            del item  # otherwise it would live until the next item is ready

    def _begin(self, source: Iterable[Any]) -> None:
        self._source, self._waiter = source, threading.get_ident()
        self._set_status(DATA)
        self._since = time.monotonic()

    def _end(self) -> None:
        self._since = None
        self._set_status(IDLE)

    def _set_status(self, at: int) -> None:
        """Set the status of this process's lanes, which other lanes can see."""
        now = time.monotonic_ns()
        for lane in self._pipe.lanes:
            row = self._pipe.internals.status_rows[lane]
            row[0], row[1] = at, now

    # ---- in the watching thread

    def _watch(self) -> None:
        signs, seen = 0, 0.0  # and the time of the last change
        while not self._closed.wait(min(_CHECK_SECONDS, self._pipe.timeout / 4)):
            since, now = self._since, time.monotonic()
            if since is None:
                continue
            if (latest := self._signs()) != signs:  # it is skipping batches that were used before
                signs, seen = latest, now
            elif now - max(since, seen) >= self._pipe.timeout:
                self._stop(self._hang(now - max(since, seen)))
                return

    def _signs(self) -> int:
        """Return a number that changes while a loader skips batches."""
        return self._source.num_passed if isinstance(self._source, Feed) else 0

    def _hang(self, seconds: float) -> HangError:
        is_alone = len(self._pipe.lanes) == self._pipe.schedule.num_lanes
        who = "the training" if is_alone else f"lane {self._pipe.lanes[0]}"
        others = "" if is_alone else "; the other lanes wait for it"
        thread = self._source.thread if isinstance(self._source, Feed) else None
        error = HangError(f"{who} has waited {seconds:.0f} s for a batch from its data loader{others}")
        stack = stack_of_thread(self._waiter if thread is None else thread.ident)
        if stack:
            error.add_note(f"the data loader: {stack}")
        return error

    def _stop(self, error: HangError) -> None:
        self._error = error
        self._pipe.internals.fail(error)
        if self._has_signal:
            signal.pthread_kill(self._waiter, _SIGNAL)
        if not self._closed.wait(_GRACE_SECONDS) and self._since is not None:
            self.on_stuck(error)

    def _raise(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a signal handler
        if self._since is not None and self._error is not None:
            raise self._error


def _print_error(error: HangError) -> None:
    sys.stderr.write("\n".join([f"Error: {error}", *getattr(error, "__notes__", ())]) + "\n")
    sys.stderr.flush()
