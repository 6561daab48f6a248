"""Exits: the codes that a training ends with, and which error means which."""

from __future__ import annotations

__all__ = [
    "AGAIN",
    "BAD_CHECKPOINT",
    "BAD_CONFIG",
    "DONE",
    "INTERRUPTED",
    "LATE",
    "LOST",
    "RAISED",
    "code_of",
    "code_of_status",
]

DONE = 0
RAISED = 1  # code of the user's, or what the numbers are: it would happen again
BAD_CONFIG = 2
BAD_CHECKPOINT = 65
AGAIN = 75  # of a process whose neighbour is lost or hangs: worth another try
INTERRUPTED = 130
LOST = 137  # processes were lost, and no restarts are left
LATE = 143  # told to end, and not all was saved in the time that was given


def code_of(error: BaseException) -> int:
    """Return the code that a process ends with when an error ends its training."""
    from penstock import errors
    from penstock.faults.lost_peers import is_lost

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
    """Return the code of a training that ended by itself, or was told to: a scheduler's SIGTERM is no failure."""
    return INTERRUPTED if status == "SIGINT" else DONE
