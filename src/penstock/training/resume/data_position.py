"""Position: where a training is in its data, as checkpoints keep it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import UsageError
from penstock.feeding.feed import Feed

__all__ = ["Position"]


class Position:
    """The place in a feed; what a checkpoint saves and restores of the data.

    Args:
        feed: the data.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed, self._is_kept = feed, False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore a checkpoint inside, and go on with the data that follows what was used, not what it had seen."""
        self._is_kept = True
        try:
            yield
        finally:
            self._is_kept = False

    def state_dict(self) -> dict[str, Any]:
        """Return where the data is."""
        return self._feed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next iteration.

        Raises:
            UsageError: when the data is another.
        """
        if self._is_kept:
            return
        try:
            self._feed.load_state_dict(state)
        except UsageError as error:
            raise UsageError(f"{error}; resume_data=False begins an epoch anew") from None
