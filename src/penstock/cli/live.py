"""Live: the demo's training as it goes, in the view that every training has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.training.callbacks.progress import Reading

__all__ = ["show_training"]

_MOST_LINES = 11  # where it is not a terminal


def show_training(readings: Iterable[Reading], *, steps: int) -> list[Reading]:
    """Show a training while it goes; return what was read."""
    from penstock.training.view.view_screen import Screen

    found = []
    with Screen(steps) as screen:
        for reading in readings:
            found.append(reading)
            screen.add(reading)
            if _is_logged(reading.step, steps):
                screen.log()
    return found


def _is_logged(step: int, num_steps: int) -> bool:
    """Is this one of the steps that get a line: the first, the last, and some at even distances?"""
    every = -(-num_steps // (_MOST_LINES - 1))
    return step in (1, num_steps) or step % every == 0
