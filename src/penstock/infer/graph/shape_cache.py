"""Shape cache: a bounded cache with one entry per shape."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 8
_REST_CALLS = 64  # unused for so many calls: evict; a capture takes as long as hundreds of replays


class ShapeCache(Generic[T]):
    """A bounded cache by shape.

    When it is full, the least recently used entry is evicted, but only if it was unused for many calls. So if more
    shapes than fit take turns, the first ones stay.

    >>> shapes = ShapeCache[str](most=1, rest_calls=2)
    >>> shapes.put("a", "made for a")
    >>> shapes.get("a"), shapes.get("b"), shapes.has_space
    ('made for a', None, False)
    >>> shapes.get("b"), shapes.has_space
    (None, True)

    Args:
        most: the maximum number of entries.
        rest_calls: the number of calls of `get` after which an unused entry can be evicted.
    """

    def __init__(self, *, most: int = _MOST, rest_calls: int = _REST_CALLS) -> None:
        self._most, self._rest_calls, self._calls = most, rest_calls, 0
        self._made: OrderedDict[object, tuple[T, int]] = OrderedDict()  # the least recently used comes first

    def get(self, shape: object) -> T | None:
        """Return the entry of a shape, or None."""
        self._calls += 1
        if shape not in self._made:
            return None
        made, _ = self._made[shape]
        self._made[shape] = (made, self._calls)
        self._made.move_to_end(shape)
        return made

    @property
    def has_space(self) -> bool:
        """Whether another entry can be added."""
        if len(self._made) < self._most:
            return True
        _, used = next(iter(self._made.values()))
        return self._calls - used >= self._rest_calls

    def evict(self) -> None:
        """Evict the least recently used entry if the cache is full."""
        if len(self._made) >= self._most:
            self._made.popitem(last=False)

    def put(self, shape: object, made: T) -> None:
        """Add an entry."""
        self.evict()
        self._made[shape] = (made, self._calls)

    def clear(self) -> None:
        """Remove all entries."""
        self._made.clear()
