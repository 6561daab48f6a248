"""Exclusive use: only one thread at a time uses a pipeline, in the process that made it."""

from __future__ import annotations

import os
import threading

from penstock.errors import UsageError


class ExclusiveUse:
    """The exclusive right to use a pipeline; `with use:` holds it."""

    def __init__(self) -> None:
        self._process, self._lock, self._user = os.getpid(), threading.Lock(), ""

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the pipeline, and not a fork of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise in a forked child process, because the lanes stay in the process that made them."""
        if not self.is_here:
            raise UsageError(
                f"the pipeline was made by process {self._process}, and this is a fork of it, process {os.getpid()}: "
                "its lanes are threads or connections, which a fork does not inherit. Make a pipeline in this process"
            )

    def __enter__(self) -> None:
        self.check()
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"the pipeline is in use by thread {self._user!r}; it runs one call at a time, and this is thread "
                f"{threading.current_thread().name!r}. Protect the calls with a lock, or call from one thread only"
            )
        self._user = threading.current_thread().name

    def __exit__(self, *_: object) -> None:
        self._lock.release()
