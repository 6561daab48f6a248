"""Exits: the codes that a training ends with, and which error means which."""

from __future__ import annotations

from collections.abc import Iterator

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

    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else RAISED
    # what went wrong in tidying up after a neighbour was lost came of that
    if any(isinstance(one, (errors.HangError, errors.LostError)) or _is_of_network(one) for one in _chain(error)):
        return AGAIN
    if isinstance(error, errors.CheckpointError):
        return BAD_CHECKPOINT
    if isinstance(error, (errors.LaneError, errors.NonFiniteError)):
        return RAISED
    return BAD_CONFIG if isinstance(error, errors.PenstockError) else RAISED


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and what it came from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _is_of_network(error: BaseException) -> bool:
    from torch import distributed as dist

    return isinstance(error, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError))


def code_of_status(status: str) -> int:
    """Return the code of a training that ended by itself, or was told to: a scheduler's SIGTERM is no failure."""
    return INTERRUPTED if status == "SIGINT" else DONE
