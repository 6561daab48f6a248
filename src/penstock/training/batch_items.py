"""Batch items: turn the items of a data source into the arguments of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.feeding.item_carrier import is_pair

Split = Callable[[Any], tuple[Any, Any]]


class ItemReader:
    """Reads the items of a data source.

    Args:
        split: a function from an item to (batch, target).
        has_target: whether an item of two parts is (batch, target); otherwise every item is a batch.
    """

    def __init__(self, split: Split | None, *, has_target: bool) -> None:
        self._split, self._has_target = split, has_target or split is not None

    def call(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any item
        """Return the arguments of `pipe.step` for an item that is already split: a batch, or a batch and its target."""
        return tuple(item) if self._has_target and is_pair(item) else (item,)

    def split(self, item: Any) -> tuple[Any, ...]:  # noqa: ANN401 - any item
        """Return the arguments of `pipe.evaluate` for an item that did not pass through a feed."""
        return self.call(item if self._split is None else self._split(item))
