"""Items: what the data gives, as a pipeline takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.feeding.tensor_destinations import is_pair

__all__ = ["Items", "Split"]

Split = Callable[[Any], tuple[Any, Any]]


class Items:
    """Reads items of the data.

    Args:
        split: from an item to (batch, target).
        has_target: an item of two things is a batch and its target; else it is a batch, whatever it is.
    """

    def __init__(self, split: Split | None, *, has_target: bool) -> None:
        self._split, self._has_target = split, has_target or split is not None

    def call(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - what the data gives
        """Return what an item, split already if it is to be, gives `pipe.step`: a batch and its target, or a batch."""
        return tuple(item) if self._has_target and is_pair(item) else (item,)

    def split(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - what the data gives
        """Return what an item that no feed has seen gives `pipe.evaluate`."""
        return self.call(item if self._split is None else self._split(item))
