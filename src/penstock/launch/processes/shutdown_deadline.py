"""Shutdown deadline: end a process a fixed time after a signal, even if it is stuck."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.launch.processes.exit_codes import INTERRUPTED, LATE

_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def shutdown_deadline(seconds: float) -> Iterator[None]:
    """Inside, end this process the given time after a signal to end; only works in the main thread.

    The interpreter may be in a long computation, or wait for a value that never comes; then it does not run Python
    signal handlers. Therefore the C-level handler wakes a thread, which measures the time.
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
        theirs.shutdown(socket.SHUT_RDWR)  # a forked data worker may still have it open
        theirs.close()
        thread.join()
        ours.close()


def _count(wakeup: socket.socket, is_over: threading.Event, seconds: float) -> None:
    number = 0
    while number not in _POLITE:
        byte = wakeup.recv(1)
        if not byte:
            return
        number = byte[0]
    if not is_over.wait(seconds):
        name = signal.Signals(number).name
        sys.stderr.write(
            f"Error: {name}: not saved within {seconds:g} s, so the process ends. Earlier checkpoints are kept.\n"
        )
        sys.stderr.flush()
        os._exit(INTERRUPTED if number == signal.SIGINT else LATE)
