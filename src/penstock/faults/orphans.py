"""Orphans: end a process when its parent is gone."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from penstock.errors import UsageError

_PR_SET_PDEATHSIG = 1
_CHECK_SECONDS = 0.5  # time between two checks of the parent


def die_with_parent(*, parent: int | None = None, pipe: int | None = None) -> None:
    """End this process with SIGKILL when its parent is gone, however the parent ended.

    On Linux, the kernel sends the signal. For the kernel, the parent is the thread that started this process, so that
    thread must live as long as this process. A second thread polls the parent and the end of a pipe, for other systems
    and for a parent in another container.

    Args:
        parent: the process that started this one, which may already be gone; by default the current parent.
        pipe: the reading end of a pipe whose writing end only the parent has.

    Raises:
        UsageError: if the pipe is not open.
    """
    if pipe is not None:
        _check_pipe(pipe)
    expected = os.getppid() if parent is None else parent
    _request_death_signal()
    if os.getppid() != expected:  # it ended before the call above
        _end()
    threading.Thread(target=_poll_parent, args=(expected,), name="penstock-parent", daemon=True).start()
    if pipe is not None:
        threading.Thread(target=_wait_for_pipe_end, args=(pipe,), name="penstock-parent-pipe", daemon=True).start()


def _check_pipe(pipe: int) -> None:
    try:
        os.fstat(pipe)
    except OSError as error:
        raise UsageError(f"pipe: {pipe} is not open: give the reading end of a pipe") from error


def _request_death_signal() -> None:
    """Tell the kernel to send SIGKILL when the thread that started this process ends; Linux only."""
    if sys.platform != "linux":
        return
    # the result does not matter: the threads check too
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_SECONDS)
    _end()


def _wait_for_pipe_end(pipe: int) -> None:
    try:
        while os.read(pipe, 1024):
            pass
    except OSError:
        return  # this process closed the pipe, so it no longer wants the watch
    _end()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
