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
_forking = 0  # the process that forks next, once forks are watched


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


def end_forks_with_this_process() -> None:
    """End every process that this one forks from now on, such as a worker of a data loader, when this one ends.

    A worker that hangs in the user's code never notices by itself that its parent is gone. The death signal of the
    kernel would be wrong here: it comes when the thread that forked the worker ends, not when the process ends.
    """
    global _forking  # noqa: PLW0603 - hooks of os.register_at_fork can't be removed
    if not _forking:
        os.register_at_fork(after_in_child=_watch_parent)
    _forking = os.getpid()


def _watch_parent() -> None:
    global _forking  # noqa: PLW0603
    threading.Thread(target=_poll_parent, args=(_forking,), name="penstock-parent", daemon=True).start()
    _forking = os.getpid()


def _check_pipe(pipe: int) -> None:
    try:
        os.fstat(pipe)
    except OSError as error:
        raise UsageError(f"pipe: {pipe} is not open: pass the reading end of a pipe") from error


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
