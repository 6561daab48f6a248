"""Exit codes: the codes with which a training ends, and the errors that cause them."""

from __future__ import annotations

DONE = 0
RAISED = 1  # user code raised, or the numbers are not finite: it would happen again
BAD_CONFIG = 2
BAD_CHECKPOINT = 65
AGAIN = 75  # a neighbour of the process is lost or hangs: a retry can help
INTERRUPTED = 130
LOST = 137  # processes were lost, and no restarts are left
LATE = 143  # ended by SIGTERM, but not everything was saved in time


def code_of(error: BaseException) -> int:
    """Return the exit code of a process whose training ends with an error."""
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
    """Return the exit code of a training that ended normally or by a signal; SIGTERM is no failure."""
    return INTERRUPTED if status == "SIGINT" else DONE
