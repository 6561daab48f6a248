"""Use: who may use a pipeline: one thread at a time, of the process that made it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from penstock.errors import UsageError

__all__ = ["Use", "one_at_a_time"]

_M = TypeVar("_M", bound=Callable[..., Any])


class Use:
    """The use of a pipeline; enter it to use the pipeline."""

    def __init__(self) -> None:
        self._process, self._lock, self._user = os.getpid(), threading.Lock(), ""

    @property
    def is_here(self) -> bool:
        """Whether this process made it, and is not a copy of the one that did."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise in a forked child.

        Raises:
            UsageError: for the lanes stay with the process that made them.
        """
        if not self.is_here:
            raise UsageError(
                f"the pipeline was made by process {self._process}, and this is a fork of it, process {os.getpid()}: "
                "its lanes are threads or connections, which do not come along. Make a pipeline in this process"
            )

    def __enter__(self) -> None:
        self.check()
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"the pipeline is in use, by thread {self._user!r}, and runs one call at a time; this is thread "
                f"{threading.current_thread().name!r}. Put a lock around the calls, or call from one thread only"
            )
        self._user = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def one_at_a_time(method: _M) -> _M:
    """Let a method of what has a `_use` run only while no other one does: see `Use`."""

    @functools.wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the method's
        with self._use:
            return method(self, *args, **kwargs)

    return cast("_M", alone)
