"""Lost peers: whether an error came from another process that is gone or hangs, so that a restart may help."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import HangError, LostError


def is_lost(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, came from another process that is lost or hangs.

    Errors while handling the loss of a process count too.

    >>> is_lost(LostError("lane 1 is gone")), is_lost(ValueError("mine"))
    (True, False)
    """
    return any(isinstance(one, (HangError, LostError)) or _is_of_network(one) for one in causes_of(error))


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _is_of_network(error: BaseException) -> bool:
    from torch import distributed as dist

    return isinstance(error, (dist.DistNetworkError, dist.DistStoreError, dist.DistBackendError))
