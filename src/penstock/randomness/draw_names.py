"""Draw names: the names of the parts of a model that draw random numbers. They do not depend on the cuts.

Programs record the name of the node or module that they run, and the code that seeds the generators reads it. Each
thread has its own name: lanes are threads, and on a GPU, a forward that is recomputed within a backward runs in one of
autograd's threads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class _Here(threading.local):
    """The part of the model that a thread runs now.

    Attributes:
        place: the draw name.
        places: the draw names of all parts of the compiled program that runs; for other code, `place` alone.
        seed: the seed of the current forward, for Python's own random numbers; None outside of a pipeline's forwards.
    """

    place: str = ""
    places: tuple[str, ...] = ("",)
    seed: int | None = None


here = _Here()

# Python's and numpy's generators belong to the process, so only one forward at a time may draw from them
_ALONE = threading.RLock()


def enter(place: str) -> None:
    """Set the draw name from here on."""
    here.place = place
    here.places = (place,)


def set_draw_names(places: tuple[str, ...]) -> None:
    """Set the draw names from here on, for a compiled program that numbers its parts."""
    here.place, here.places = places[0], places


@contextmanager
def seeded_python(seed: int) -> Iterator[None]:
    """Draw Python's and numpy's random numbers from a seed; afterwards, restore the state of their generators."""
    with _ALONE:
        python, numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
