"""Heartbeats: whether a process that others wait for, before the first step, goes on with what it does.

Before the first step nobody knows how long something takes: a lane may measure for minutes. It gives a sign every
second. Who gives none any more, or is stopped, is named by those who wait, long before their time is over.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from penstock.errors import HangError, LostError
from penstock.runtime.lanes.hang_report import state_of
from penstock.runtime.lanes.status_board import StatusBoard
from penstock.runtime.wire.process_transport import BEAT, LAST_BEAT, ProcessTransport

__all__ = ["Heartbeats"]

_EVERY_SECONDS = 1.0
_STOPPED_SECONDS, _SILENT_SECONDS = 10.0, 60.0  # that a lane may be stopped, or give no sign, while others wait
_SAY_FIRST_SECONDS, _SAY_SECONDS = 15.0, 30.0


class Heartbeats:
    """The signs that this process gives until `stop`, and those of the lanes that it waits for.

    Args:
        transport: brings them.
        board: knows the processes of the lanes.
    """

    def __init__(self, transport: ProcessTransport, board: StatusBoard) -> None:
        self._transport, self._board, self._lane = transport, board, transport.lane
        self._begin()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-signs", daemon=True)
        self._thread.start()

    def _begin(self, lane: int = -1) -> None:
        """Begin to wait for a lane. All times are seconds of this wait."""
        self._awaited, self._seconds = lane, 0.0
        self._num_beats, self._beat_at = 0, 0.0
        self._stopped_at: float | None = None
        self._said_at = _SAY_FIRST_SECONDS - _SAY_SECONDS

    def _beat(self) -> None:
        while not self._is_over.wait(_EVERY_SECONDS):
            self._tell(b"")

    def _tell(self, body: bytes) -> None:
        for other in self._transport.links.peers:
            with suppress(LostError):
                self._transport.links.send(other, BEAT, body)

    def stop(self) -> None:
        """Give no more: nobody is to wait for them."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            self._tell(LAST_BEAT)

    def look(self, lane: int, seconds: float) -> None:
        """Look at a lane that is waited for, so long by now.

        Raises:
            HangError: when it is stopped, or gives no sign any more.
        """
        if lane != self._awaited or seconds < self._seconds:
            self._begin(lane)
        self._seconds = seconds
        num_beats, state = self._transport.num_beats[lane], state_of(self._board.process(lane)[0])
        if num_beats != self._num_beats:
            self._num_beats, self._beat_at = num_beats, seconds
        if " is stopped " not in state:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = seconds
        own = "captures the model" if lane else "captures, measures and cuts the model"
        doing = own if num_beats else "is not ready"
        silent = seconds - self._beat_at if num_beats else 0.0
        stopped = 0.0 if self._stopped_at is None else seconds - self._stopped_at
        if stopped >= _STOPPED_SECONDS or silent >= _SILENT_SECONDS:
            raise HangError(
                f"lane {self._lane} has waited {seconds:.0f} s for lane {lane}, which {doing}, and has given no sign "
                f"for {max(silent, stopped):.0f} s" + (f"; {state}" if state else "")
            )
        self._say(lane, doing)

    def _say(self, lane: int, doing: str) -> None:
        """Say now and then on stderr that others wait; one of them does."""
        if self._lane == (1 if lane == 0 else 0) and self._seconds >= self._said_at + _SAY_SECONDS:
            self._said_at = self._seconds
            sys.stderr.write(f"lane {self._lane} has waited {self._seconds:.0f} s for lane {lane}, which {doing}\n")
            sys.stderr.flush()
