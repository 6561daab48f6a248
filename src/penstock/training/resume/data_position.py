"""Data position: the position of a training in its data, as checkpoints store it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import UsageError
from penstock.feeding.feed import Feed


class DataPosition:
    """The position in a feed, in the form that a checkpoint saves and restores.

    Args:
        feed: the data.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self._is_kept = feed, False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While the context is active, restoring a checkpoint keeps the current position instead of the saved one."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position in the next iteration.

        Raises:
            UsageError: if the data is different.
        """
        if self._is_kept:
            return
        try:
            self._feed.load_state_dict(state)
        except UsageError as error:
            raise UsageError(f"{error}; resume_data=False starts a new epoch") from None
