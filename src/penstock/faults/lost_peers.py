"""Lost: whether an error came of another process that is gone or hangs: then another try may do."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import HangError, LostError

__all__ = ["is_lost"]


def is_lost(error: BaseException) -> bool:
    """Return whether a neighbour that is lost or hangs is behind an error, or behind what it came from.

    What goes wrong in tidying up after a neighbour was lost came of that.

    >>> is_lost(LostError("lane 1 is gone")), is_lost(ValueError("mine"))
    (True, False)
    """
    return any(isinstance(one, (HangError, LostError)) or _is_of_network(one) for one in _chain(error))


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
