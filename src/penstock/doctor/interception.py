"""Interception: patches for what the dispatch mode cannot see: prints, explicit waits, data loaders, torch warnings."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import dataloader

from penstock.devices import cuda
from penstock.doctor.doctor_report import Kind
from penstock.doctor.gpu_tensors import GpuTensors
from penstock.doctor.sightings import Tally
from penstock.doctor.source_lines import find_place
from penstock.feeding.item_source import Channel, InlineSource

_MESSAGE = "called a synchronizing CUDA operation"


@contextmanager
def intercepted(tally: Tally, where: GpuTensors, thread: int) -> Iterator[None]:
    """Time calls that wait, in all threads, while the context is active."""

    def is_on_device(tensor: torch.Tensor, *_: object) -> bool:
        return where.is_on_device(tensor)

    def timed(
        kind: Kind,
        original: Any,  # noqa: ANN401 - a function
        applies: Callable[..., bool] = lambda *_: True,
        *,
        drains: bool = True,
    ) -> Any:  # noqa: ANN401
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not applies(*args):
                return original(*args, **kwargs)
            begin = time.perf_counter()
            found = original(*args, **kwargs)
            end = time.perf_counter()
            place = find_place(thread)
            tally.add(kind, place, blocked=end - begin)
            if drains:
                tally.drained(kind, place, end)
            return found

        return wrapper

    with ExitStack() as stack:

        def patch(owner: Any, name: str, made: Any) -> None:  # noqa: ANN401 - a class or a module, and a function
            stack.enter_context(_patched(owner, name, made))

        patch(torch.Tensor, "__repr__", timed(Kind.PRINT, torch.Tensor.__repr__, is_on_device))
        pulls = _LoaderTimer(tally, where, thread)
        iterator = dataloader._BaseDataLoaderIter
        patch(iterator, "__next__", pulls.timed(iterator.__next__))
        for feeding in (Channel, InlineSource):
            patch(feeding, "take", pulls.timed(feeding.take))
        workers = dataloader._MultiProcessingDataLoaderIter
        patch(workers, "__init__", _without_modes(workers.__init__))
        if where.is_real:
            for owner, drains in cuda.waiting_calls():
                patch(owner, "synchronize", timed(Kind.WAIT, owner.synchronize, drains=drains))
        else:  # on a CPU, these dispatch no operation
            patch(torch.Tensor, "cpu", _fetching(timed(Kind.TO_HOST, torch.Tensor.cpu, is_on_device), where))
            for name in ("tolist", "numpy"):
                patch(torch.Tensor, name, timed(Kind.TO_HOST, getattr(torch.Tensor, name), is_on_device))
        yield


def _fetching(original: Any, where: GpuTensors) -> Any:  # noqa: ANN401 - a function
    """Mark the result as a host tensor; on a CPU it is the same tensor."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        found = original(*args, **kwargs)
        where.mark_fetched(found)
        return found

    return wrapper


class _LoaderTimer:
    """Times how long the host waits for data; the GPU is idle meanwhile if it has no work left at the end.

    Only the watched thread counts. If another thread reads ahead, as that of penstock.feed does, only the wait for its
    result counts.
    """

    def __init__(self, tally: Tally, where: GpuTensors, thread: int) -> None:
        self._tally, self._where, self._thread = tally, where, thread
        self._is_pulling = False

    def timed(self, original: Any) -> Any:  # noqa: ANN401 - a function
        """Wrap a function that reads data; calls within another such function are not timed."""

        @functools.wraps(original)
        def wrapper(*args: Any) -> Any:  # noqa: ANN401
            if threading.get_ident() != self._thread or self._is_pulling:
                return original(*args)
            begin, self._is_pulling = time.perf_counter(), True
            try:
                found = original(*args)
            finally:
                self._is_pulling = False
            waited = time.perf_counter() - begin
            is_dry = self._where.is_in_use and cuda.has_nothing_to_do()
            place = find_place(self._thread)
            self._tally.add(Kind.STARVED, place, blocked=waited, idle=waited if is_dry else 0.0)
            return found

        return wrapper


def _without_modes(original: Any) -> Any:  # noqa: ANN401 - a function
    """Start a data loader's workers without dispatch modes: forked workers would inherit ours and be slow."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        with _disable_current_modes():
            original(*args, **kwargs)

    return wrapper


@contextmanager
def _patched(owner: Any, name: str, made: Any) -> Iterator[None]:  # noqa: ANN401 - a class or a module, and a function
    """Replace an attribute; afterwards restore the owner's own or inherited one."""
    is_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, made)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class SyncWarnings:
    """Torch's own warnings about waits, in any thread, with the stack of that moment.

    They include waits that are in no table, but not their duration.
    """

    def __init__(self, tally: Tally, thread: int) -> None:
        self._tally, self._thread = tally, thread
        self._show_before: Any = None
        self._mode_before = 0
        self._is_on = False

    def start(self) -> None:
        """Enable torch's warnings; if they are enabled, put our filter before the script's filters again."""
        if self._is_on:
            self._put_filter_first()
            return
        self._mode_before = cuda.sync_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a prototype feature, which a script may turn into an error
            cuda.set_sync_mode("warn")
        self._is_on = True
        self._show_before = warnings.showwarning
        warnings.showwarning = self._show
        self._put_filter_first()

    def stop(self) -> None:
        """Restore the previous state; does nothing if stopped."""
        if not self._is_on:
            return
        self._is_on = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cuda.set_sync_mode(self._mode_before)
        self._remove_filter()
        if warnings.showwarning == self._show:  # unless the script has replaced it since
            warnings.showwarning = self._show_before

    def _put_filter_first(self) -> None:
        self._remove_filter()
        warnings.filterwarnings("always", message=_MESSAGE)

    def _remove_filter(self) -> None:
        ours = [f for f in warnings.filters if getattr(f[1], "pattern", "") == _MESSAGE]
        for entry in ours:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list; typed as a sequence

    def _show(  # noqa: PLR0917 - Python's signature
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message).startswith(_MESSAGE):
            self._tally.add(Kind.OTHER, find_place(self._thread))
        else:
            self._show_before(message, category, filename, lineno, file, line)
