"""Grace: a training that is told to end has so long for it, and no longer, whatever it is stuck in."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.launch.processes.exit_codes import INTERRUPTED, LATE

__all__ = ["grace"]

_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def grace(seconds: float) -> Iterator[None]:
    """End this process, inside, when it was told to end so long ago; only the main thread can ask for that.

    The interpreter may be deep in a computation, or wait for a value that never comes: then it does not get to handlers
    of signals. So the kernel's handler wakes a thread, which counts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    is_over = threading.Event()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_count, args=(ours, is_over, seconds), name="penstock-grace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        theirs.shutdown(socket.SHUT_RDWR)  # a data worker that was forked inside has it open too
        theirs.close()
        thread.join()
        ours.close()


def _count(told: socket.socket, is_over: threading.Event, seconds: float) -> None:
    number = 0
    while number not in _POLITE:
        byte = told.recv(1)
        if not byte:
            return
        number = byte[0]
    if not is_over.wait(seconds):
        name = signal.Signals(number).name
        sys.stderr.write(f"Error: {name}, and after {seconds:g} s it is not saved: left. Earlier checkpoints stand.\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED if number == signal.SIGINT else LATE)
