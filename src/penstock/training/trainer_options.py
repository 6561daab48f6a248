"""Trainer options: the options of a trainer, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path

from penstock.errors import UsageError, nearest

ON_NAN = ("stop", "skip", "rewind", "ignore")
ON_OOM = ("split", "stop")


@dataclass(frozen=True)
class TrainerOptions:
    """The options of a trainer, named as its arguments; wrong ones raise a UsageError with all faults."""

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
    on_oom: str
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
                yield f"{name}: must be a whole number of at least {number}; given: {given!r}"
        for name in ("clip", "max_seconds"):
            given = getattr(self, name)
            if given is not None and (
                isinstance(given, bool) or not isinstance(given, Real) or not 0 < float(given) < math.inf
            ):
                yield f"{name}: must be a number above zero, or None; given: {given!r}"
        for name, words in (("on_nan", ON_NAN), ("on_oom", ON_OOM)):
            given = getattr(self, name)
            if given not in words:
                yield f"{name}: {given!r} is not one of {', '.join(words)}.{nearest(str(given), words)}"
        if not isinstance(self.resume, (str, Path)) or not str(self.resume):
            yield f'resume: must be "auto", "never" or the folder of a checkpoint; given: {self.resume!r}'
