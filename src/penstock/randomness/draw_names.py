"""Drawing: which part of the model draws random numbers now, by a name that does not depend on the cuts.

Programs write down the name of the node or module that they run; what seeds the generators reads it. Each thread has
its own: lanes are threads, and on a GPU a forward that is run again within a backward runs in a thread of autograd's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

__all__ = ["enter", "enter_all", "here", "seeded_python"]


class _Here(threading.local):
    """What a thread runs now.

    Attributes:
        place: the name of what draws.
        places: the names of all parts of the compiled program that runs; of other code the one place.
        seed: of the forward that runs, for Python's own random numbers; None outside of a pipeline's forwards.
    """

    place: str = ""
    places: tuple[str, ...] = ("",)
    seed: int | None = None


here = _Here()

# Python's and numpy's generators are the process's, so a forward that draws from them must be alone in the process
_ALONE = threading.RLock()


def enter(place: str) -> None:
    """Note what draws from here on."""
    here.place = place
    here.places = (place,)


def enter_all(places: tuple[str, ...]) -> None:
    """Note what may draw from here on, in a compiled program that numbers its parts."""
    here.place, here.places = places[0], places


@contextmanager
def seeded_python(seed: int) -> Iterator[None]:
    """Draw Python's and numpy's random numbers from a seed; afterwards their generators go on as before."""
    with _ALONE:
        python, numpy = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
