"""Signals: after a first signal to end, a training finishes its step, saves and ends; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

_POLITE = (signal.SIGTERM, signal.SIGINT) + ((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ())


class Signals:
    """Catches SIGTERM, SIGINT and SIGHUP while it is open.

    The first signal is recorded, and the training ends after its step. A second SIGINT raises KeyboardInterrupt; a
    second SIGTERM or SIGHUP has its previous effect. Only the main thread can catch signals; in other threads, nothing
    is caught.
    """

    def __init__(self) -> None:
        self.received: str | None = None  # the name of the first signal
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _POLITE:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        before = self._before.get(number)
        signal.signal(number, before if before is not None else signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
