"""Tally: what was seen where, how often and for how long; threads may add to it at the same time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from penstock.doctor.finding_kinds import Kind
from penstock.doctor.slow_reductions import Reduction
from penstock.doctor.source_lines import Place

__all__ = ["Entry", "Key", "Phase", "Tally"]

LAUNCH_SECONDS = 5e-6  # about what passes from asking for a kernel to its start on an idle GPU

Key = tuple[Kind, Place]


class Phase(Enum):
    """What a step is for: to warm up, to be timed as it is, or to be looked at."""

    WARM = "warm"
    TIMED = "timed"
    LOOKED = "looked"


@dataclass
class Entry:
    """What one place did.

    Attributes:
        count: times.
        blocked_seconds: that the host spent in it.
        idle_seconds: that the device was without work after it, about.
        detail: of the first time, as a shape.
        reduction: of the first time.
    """

    count: int = 0
    blocked_seconds: float = 0.0
    idle_seconds: float = 0.0
    detail: str = ""
    reduction: Reduction | None = None

    def add(self, other: Entry) -> None:
        """Add what the same place did at other times."""
        self.count += other.count
        self.blocked_seconds += other.blocked_seconds
        self.idle_seconds += other.idle_seconds
        self.detail = self.detail or other.detail
        self.reduction = self.reduction or other.reduction


class Tally:
    """Entries of the step under way, and of the whole steps before it.

    How long the device is idle cannot be seen from the host. When the host has waited for the device, the device has
    nothing left to do, and gets something to do when the host next asks for it: what lies between, and what a launch
    takes, is put down to the place that waited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[Key, Entry] = {}
        self._kept: dict[Phase, dict[Key, Entry]] = {phase: {} for phase in Phase}
        self._drained: tuple[Key, float] | None = None  # who waited last, and until when

    def add(
        self,
        kind: Kind,
        place: Place,
        *,
        blocked: float = 0.0,
        idle: float = 0.0,
        detail: str = "",
        reduction: Reduction | None = None,
    ) -> None:
        """Note that a place did something once."""
        with self._lock:
            entry = Entry(1, blocked, idle, detail, reduction)
            self._now.setdefault((kind, place), Entry()).add(entry)

    def drained(self, kind: Kind, place: Place, at: float) -> None:
        """Note that a place waited until the device had nothing left to do."""
        with self._lock:
            self._drained = ((kind, place), at)

    def launched(self, at: float) -> None:
        """Note that the device was given something to do."""
        if self._drained is None:  # asked first without the lock: this is called for every operation
            return
        with self._lock:
            if self._drained is not None:
                key, since = self._drained
                self._drained = None
                idle = max(0.0, at - since) + LAUNCH_SECONDS
                self._now.setdefault(key, Entry()).idle_seconds += idle

    def commit(self, phase: Phase) -> None:
        """Keep what was noted since the last time: a step is over."""
        with self._lock:
            kept = self._kept[phase]
            for key, entry in self._now.items():
                kept.setdefault(key, Entry()).add(entry)
            self._now, self._drained = {}, None  # what follows may not be looked at, so nobody sees the next launch

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._now, self._drained = {}, None
            self._kept = {phase: {} for phase in Phase}

    def entries(self, phase: Phase | None) -> dict[Key, Entry]:
        """Return what was kept of the steps of a phase; of None, what belongs to no whole step."""
        with self._lock:
            return dict(self._now if phase is None else self._kept[phase])
