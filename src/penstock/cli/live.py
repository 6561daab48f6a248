"""Live view: show the training of the demo while it runs, in the view of all trainings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Reading

_MOST_LINES = 11  # if stdout is not a terminal


def show_training(readings: Iterable[Reading], *, steps: int) -> list[Reading]:
    """Show a training while it runs; return its readings."""
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
    """Return whether a step gets a line: the first, the last, and some at equal distances."""
    every = -(-num_steps // (_MOST_LINES - 1))
    return step in (1, num_steps) or step % every == 0
