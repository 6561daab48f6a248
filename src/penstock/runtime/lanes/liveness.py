"""Heartbeats: signs that a process still makes progress while others wait for it before the first step.

Before the first step, no timeout fits: a lane may measure for minutes. So every process sends a heartbeat each second.
If a process sends no more of them, or is stopped, the waiting processes raise an error that names it, long before
their timeout.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from penstock.errors import HangError, LostError
from penstock.runtime.lanes.hang_report import state_of
from penstock.runtime.lanes.status_board import StatusBoard
from penstock.runtime.wire.process_transport import BEAT, LAST_BEAT, ProcessTransport

_EVERY_SECONDS = 1.0
_STOPPED_SECONDS, _SILENT_SECONDS = 10.0, 60.0  # the longest that a lane may be stopped, or send no heartbeat
_SAY_FIRST_SECONDS, _SAY_SECONDS = 15.0, 30.0


class Heartbeats:
    """The heartbeats that this process sends until `stop`, and those of the lanes that it waits for.

    Args:
        transport: sends and receives the heartbeats.
        board: the status board, which holds the process IDs of the lanes.
    """

    def __init__(self, transport: ProcessTransport, board: StatusBoard) -> None:
        self._transport, self._board, self._lane = transport, board, transport.lane
        self._begin()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-signs", daemon=True)
        self._thread.start()

    def _begin(self, lane: int = -1) -> None:
        """Begin a wait for a lane. All times are seconds since the start of this wait."""
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
        """Send the last heartbeat, after which the other processes expect no more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            self._tell(LAST_BEAT)

    def look(self, lane: int, seconds: float) -> None:
        """Check a lane for which this process has waited for `seconds`.

        Raises:
            HangError: if the lane is stopped, or sends no more heartbeats.
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
                f"lane {self._lane} has waited {seconds:.0f} s for lane {lane}, which {doing}, and has sent no "
                f"heartbeat for {max(silent, stopped):.0f} s" + (f"; {state}" if state else "")
            )
        self._say(lane, doing)

    def _say(self, lane: int, doing: str) -> None:
        """Report on stderr, from time to time, that lanes wait; only one of the waiting lanes does this."""
        if self._lane == (1 if lane == 0 else 0) and self._seconds >= self._said_at + _SAY_SECONDS:
            self._said_at = self._seconds
            sys.stderr.write(f"lane {self._lane} has waited {self._seconds:.0f} s for lane {lane}, which {doing}\n")
            sys.stderr.flush()
