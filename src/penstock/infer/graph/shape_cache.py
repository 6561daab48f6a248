"""Shapes: what was made for each of the shapes that come most, as many as there may be."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Shapes"]

T = TypeVar("T")

_MOST = 8
_REST_CALLS = 64  # after which what has not been used makes room: a capture takes as long as hundreds of replays


class Shapes(Generic[T]):
    """A few things by shape.

    There is room for a new one while they are few. After that the one that has rested longest makes room, but only if
    it has rested for many calls: where more shapes take turns than there is room for, the first ones stay.

    >>> shapes = Shapes[str](most=1, rest_calls=2)
    >>> shapes.put("a", "made for a")
    >>> shapes.get("a"), shapes.get("b"), shapes.has_room
    ('made for a', None, False)
    >>> shapes.get("b"), shapes.has_room
    (None, True)

    Args:
        most: how many there may be.
        rest_calls: how many calls of `get` one must have rested to make room.
    """

    def __init__(self, *, most: int = _MOST, rest_calls: int = _REST_CALLS) -> None:
        self._most, self._rest_calls, self._calls = most, rest_calls, 0
        self._made: OrderedDict[object, tuple[T, int]] = OrderedDict()  # the one that has rested longest comes first

    def get(self, shape: object) -> T | None:
        """Return what was made for a shape, or None."""
        self._calls += 1
        if shape not in self._made:
            return None
        made, _ = self._made[shape]
        self._made[shape] = (made, self._calls)
        self._made.move_to_end(shape)
        return made

    @property
    def has_room(self) -> bool:
        """Whether something can be made for another shape."""
        if len(self._made) < self._most:
            return True
        _, used = next(iter(self._made.values()))
        return self._calls - used >= self._rest_calls

    def make_room(self) -> None:
        """Let the one go that has rested longest, if there is no place for another."""
        if len(self._made) >= self._most:
            self._made.popitem(last=False)

    def put(self, shape: object, made: T) -> None:
        """Keep what was made for a shape."""
        self.make_room()
        self._made[shape] = (made, self._calls)

    def clear(self) -> None:
        """Let all go."""
        self._made.clear()
