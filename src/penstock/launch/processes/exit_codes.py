"""Exit codes: the codes with which a training ends, and the decision after a failure whether processes restart."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock import errors
from penstock.faults.lost_peers import is_lost

DONE = 0
RAISED = 1  # user code raised, or the numbers are not finite: it would happen again
BAD_CONFIG = 2
BAD_CHECKPOINT = 65
AGAIN = 75  # a neighbour of the process is lost or hangs: a retry can help
INTERRUPTED = 130
LOST = 137  # processes were lost, and no restarts are left
LATE = 143  # ended by SIGTERM, but not everything was saved in time

_HOUR = 3600.0
_MOST_SECONDS = 30.0
_FINAL = (BAD_CONFIG, BAD_CHECKPOINT, RAISED, INTERRUPTED)  # in order of precedence


def code_of(error: BaseException) -> int:
    """Return the exit code of a process whose training ends with an error."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else RAISED
    if is_lost(error):
        return AGAIN
    if isinstance(error, errors.CheckpointError):
        return BAD_CHECKPOINT
    if isinstance(error, (errors.LaneError, errors.NonFiniteError)):
        return RAISED
    return BAD_CONFIG if isinstance(error, errors.PenstockError) else RAISED


def code_of_status(status: str) -> int:
    """Return the exit code of a training that ended normally or by a signal; SIGTERM is no failure."""
    return INTERRUPTED if status == "SIGINT" else DONE


@dataclass(frozen=True)
class Verdict:
    """A decision with its reason: restart after some seconds, or end with a code."""

    is_again: bool
    code: int
    why: str
    seconds: float = 0.0
    is_reported: bool = False  # the processes have reported the error themselves


@dataclass
class Policy:
    """Judges failures one after the other."""

    max_restarts: int  # per hour
    _restarts: list[float] = field(default_factory=list)
    _before: tuple[Any, ...] | None = None

    def judge(
        self,
        exits: Mapping[int, int],
        faults: Sequence[Mapping[str, Any]],
        *,
        now: float,
        signal_name: str | None = None,
        stuck: Sequence[int] = (),
    ) -> Verdict:
        """Return the decision after processes ended.

        Args:
            exits: exit codes of the processes, by rank; negative: the signal that ended a process.
            faults: the faults that they wrote in this attempt.
            now: seconds of a monotonic clock.
            signal_name: the name of the signal that the launcher received, if any.
            stuck: processes that did not end by themselves and were killed.
        """
        if signal_name is not None:
            # a process that SIGTERM itself ended had not started; later, processes handle SIGTERM and save
            is_saved = set(exits.values()) <= {DONE, -signal.SIGTERM} and not stuck
            code = INTERRUPTED if signal_name == "SIGINT" else DONE if is_saved else LATE
            return Verdict(
                False, code, f"{signal_name}: {'everything is saved' if is_saved else show_exits(exits, stuck)}"
            )
        final = next((code for code in _FINAL if code in exits.values()), None)
        if final is not None:
            return Verdict(False, final, "an error that would happen again", is_reported=True)
        # a process that raised and was then killed while waiting for its last save has written the reason
        raised = [fault for fault in faults if fault.get("kind") == "error" and fault.get("is_lost") is False]
        unknown = [code for code in exits.values() if code > 0 and code != AGAIN]
        if unknown or (stuck and raised):
            return Verdict(False, RAISED, show_exits(exits, stuck) if unknown else str(raised[0].get("message")))
        signature = _signature(faults)
        if signature is not None and signature == self._before:
            step, message = signature
            return Verdict(False, RAISED, f"the same failure twice, at step {step}: {message}; it would happen again")
        self._before = signature
        self._restarts = [time for time in self._restarts if now - time < _HOUR]
        if len(self._restarts) >= self.max_restarts:
            return Verdict(
                False,
                LOST,
                f"{show_exits(exits, stuck)}; restarts in the last hour: {len(self._restarts)} of {self.max_restarts}",
            )
        count = len(self._restarts)
        self._restarts.append(now)
        return Verdict(
            True, LOST, show_exits(exits, stuck), 0.0 if not count else min(2.0 ** (count - 1), _MOST_SECONDS)
        )


def _signature(faults: Sequence[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """Return what identifies a hang: the step and the message; None for other failures, such as a kill from outside."""
    hangs = [fault for fault in faults if fault.get("kind") == "end" and fault.get("error") == "HangError"]
    if not hangs:
        return None
    first = min(hangs, key=lambda fault: fault.get("lane", 0))
    words = str(first.get("message")).partition("; its process")[0]  # the process number differs each time
    return first.get("step"), re.sub(r"\d+(\.\d+)? s\b", "so long", words)


def show_exits(exits: Mapping[int, int], stuck: Sequence[int] = ()) -> str:
    """Describe how processes ended."""
    found: dict[str, list[int]] = {}
    for rank, code in sorted(exits.items()):
        how = "lost a neighbour" if code == AGAIN else f"ended with {code}"
        if code < 0:
            try:
                how = f"was killed by {signal.Signals(-code).name}"
            except ValueError:
                how = f"was killed by signal {-code}"
        found.setdefault(how, []).append(rank)
    if stuck:
        found["did not end by itself and was killed"] = list(stuck)
    # processes that ended because of others are only worth mentioning if there is nothing else
    words = {how: ranks for how, ranks in found.items() if how != "lost a neighbour"} or found
    return ", ".join(f"process {' and '.join(map(str, ranks))} {how}" for how, ranks in words.items())
