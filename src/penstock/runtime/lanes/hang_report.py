"""Hang report: the state of the process of a hanging lane, and the line of code that it is at."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path

# a signal that nothing else uses; its handler runs no Python, so a process that never releases the GIL answers too
SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else 0
_SECONDS, _POLL_SECONDS = 1.0, 0.02
_MOST_FRAMES = 30

_STATES = {
    "T": "is stopped (SIGSTOP, or Ctrl-Z)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "D": "waits for a disk or a device",
    "R": "is running",
    "S": "is sleeping, or waits for something",
}


@cache
def stack_file() -> int:
    """Return the descriptor of the file where this process writes its stack on a signal; -1 if it cannot.

    The file is memory that other processes of this user can read under `/proc`. It stays as long as the process,
    because every process that has its descriptor may send the signal.
    """
    if sys.platform != "linux" or signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create("penstock-stack")
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    return file


def state_of(process: int) -> str:
    """Return a description of the state of a process of this machine, as the system reports it; "" if it is unknown."""
    if process <= 0:
        return ""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"its process {process} is gone" if sys.platform == "linux" else ""
    return f"its process {process} {_STATES.get(state, f'is in state {state}')}"


def stack_of_process(process: int, file: int) -> str:
    """Request the stack of a process, and return that of its main thread; "" if it does not answer."""
    if process <= 0 or file < 0 or " is stopped " in state_of(process):
        return ""
    path = Path(f"/proc/{process}/fd/{file}")
    with suppress(OSError):
        before = seen = path.stat().st_size
        os.kill(process, SIGNAL)
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            size = path.stat().st_size
            if size > before and size == seen:
                break
            seen = size
        written = path.read_bytes()[before:].decode(errors="replace")
        # the newest thread comes first, so the main thread comes last
        return _stack_text(written.strip().rpartition("\n\n")[2].splitlines()[1:])
    return ""


def stack_of_thread(thread: int | None) -> str:
    """Return the stack of a thread of this process; "" if it has none."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ""
    lines = [f'  File "{at.filename}", line {at.lineno} in {at.name}' for at in traceback.extract_stack(frame)]
    return _stack_text(lines[::-1])


def _stack_text(lines: list[str]) -> str:
    return "\n".join(["stack (most recent call first):", *lines[:_MOST_FRAMES]]) if lines else ""
