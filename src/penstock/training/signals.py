"""Signals: a training that is told to end finishes its step, saves and leaves; told twice, it leaves at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Signals"]

_POLITE = (signal.SIGTERM, signal.SIGINT) + ((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ())


class Signals:
    """Notes SIGTERM, SIGINT and SIGHUP while it is open.

    The first is noted, and the training ends after its step. A second one of the keyboard raises KeyboardInterrupt, a
    second SIGTERM does what it did before. Only the main thread can do this: elsewhere nothing is noted.

    Attributes:
        told: the name of the first signal that came; None where none did.
    """

    def __init__(self) -> None:
        self.told: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _POLITE:
                self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.told is None:
            self.told = signal.Signals(number).name
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        before = self._before.get(number)
        signal.signal(number, before if before is not None else signal.SIG_DFL)
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before.clear()
