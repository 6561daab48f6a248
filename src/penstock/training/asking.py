"""Asked: what a trainer was asked for, checked whole before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from penstock.errors import UsageError, nearest

__all__ = ["ON_NAN", "Asked"]

ON_NAN = ("stop", "skip", "rewind", "ignore")


@dataclass(frozen=True)
class Asked:
    """The numbers and words of a trainer, as its arguments are called.

    Raises:
        UsageError: naming all that cannot be right.
    """

    steps: int
    validate_every: int
    clip: float | None
    accumulate: int
    checkpoint_every: int
    keep_checkpoints: int
    resume: str | Path
    log_every: int
    record_every: int
    on_nan: str
    max_seconds: float | None

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise UsageError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        least = {"steps": 1, "accumulate": 1, "keep_checkpoints": 1, "log_every": 1}
        least |= {"validate_every": 0, "checkpoint_every": 0, "record_every": 0}
        for name, number in least.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Integral) or given < number:
                yield f"{name}: must be a whole number, {number} or more; given: {given!r}"
        for name in ("clip", "max_seconds"):
            given = getattr(self, name)
            if given is not None and (
                isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) < math.inf
            ):
                yield f"{name}: must be a number above zero, or None; given: {given!r}"
        if self.on_nan not in ON_NAN:
            yield f"on_nan: {self.on_nan!r} is not one of {', '.join(ON_NAN)}.{nearest(str(self.on_nan), ON_NAN)}"
        if not isinstance(self.resume, (str, Path)) or not str(self.resume):
            yield f'resume: give "auto", "never" or the folder of a checkpoint; given: {self.resume!r}'
