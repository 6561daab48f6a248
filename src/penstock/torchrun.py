"""What torchrun says of this process."""

from __future__ import annotations

import os
from collections.abc import Iterator

from penstock.errors import UsageError

__all__ = ["attempt", "environment_faults"]

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")


def environment_faults() -> Iterator[str]:
    """Yield what is wrong with the variables that torchrun sets: each must be a whole number, where it is set."""
    for name in _NUMBERS:
        given = os.environ.get(name, "0")
        if not (given.isdecimal() and given.isascii() and len(given) < 10):
            yield f"{name}: this environment variable must be a whole number, or not be set; given: {given!r:.80}"


def attempt() -> int:
    """Return how often torchrun has started the processes again; 0 for those that are the first.

    Raises:
        UsageError: when the environment holds something else.
    """
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    try:
        return int(given)
    except ValueError:
        raise UsageError(
            f"TORCHELASTIC_RESTART_COUNT: this environment variable must be a whole number; given: {given!r:.80}"
        ) from None
