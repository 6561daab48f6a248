"""Orphans: a process that ends when the one that started it is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from penstock.errors import UsageError

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
_SECONDS = 0.5  # from one look at the parent to the next


def die_with_parent(*, parent: int | None = None, pipe: int | None = None) -> None:
    """End this process, by SIGKILL, when its parent is gone, however that ended.

    On Linux the kernel sends the signal; for it the parent is the thread that started this process, so that thread must
    live as long as this process may. A thread looks too, for systems where it does not, and where the parent is in
    another container: at who the parent is, and at the end of a pipe.

    Args:
        parent: the process that started this one; it may be gone by now. By default the parent there is.
        pipe: the reading end of a pipe of which only the parent has the writing end.

    Raises:
        UsageError: when the pipe is none.
    """
    if pipe is not None:
        _check_pipe(pipe)
    expected = os.getppid() if parent is None else parent
    _ask_kernel()
    if os.getppid() != expected:  # it ended before the kernel was asked
        _end()
    threading.Thread(target=_look, args=(expected,), name="penstock-parent", daemon=True).start()
    if pipe is not None:
        threading.Thread(target=_read, args=(pipe,), name="penstock-parent-pipe", daemon=True).start()


def _check_pipe(pipe: int) -> None:
    try:
        os.fstat(pipe)
    except OSError as error:
        raise UsageError(f"pipe: {pipe} is not open: give the reading end of a pipe") from error


def _ask_kernel() -> None:
    """Let the kernel send SIGKILL when the thread that started this process ends; only Linux can."""
    if sys.platform != "linux":
        return
    # what it returns does not matter: the threads look too
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    _end()


def _read(pipe: int) -> None:
    try:
        while os.read(pipe, 1024):
            pass
    except OSError:
        return  # closed here: whoever did so does not want to be watched by it
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
