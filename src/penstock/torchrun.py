"""torchrun: the environment variables that it sets for each process."""

from __future__ import annotations

import os
from collections.abc import Iterator

from penstock.errors import UsageError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")


def environment_faults() -> Iterator[str]:
    """Yield the faults of the variables that torchrun sets: each must be a whole number or unset."""
    for name in _NUMBERS:
        given = os.environ.get(name, "0")
        if not (given.isdecimal() and given.isascii() and len(given) < 10):
            yield f"{name}: this environment variable must be a whole number or unset; given: {given!r:.80}"


def attempt() -> int:
    """Return how often torchrun has restarted the processes; raise a UsageError if the variable is not a number."""
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0"
    try:
        return int(given)
    except ValueError:
        raise UsageError(
            f"TORCHELASTIC_RESTART_COUNT: this environment variable must be a whole number; given: {given!r:.80}"
        ) from None
