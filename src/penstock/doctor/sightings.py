"""Sightings: what was seen at which line, how often and for how long; several threads may add at the same time."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from penstock.doctor.doctor_report import Kind
from penstock.doctor.slow_reductions import Reduction
from penstock.doctor.source_lines import Place

LAUNCH_SECONDS = 5e-6  # about the time from a launch to the kernel's start on an idle GPU

Key = tuple[Kind, Place]


class Phase(Enum):
    """The phase of a step: warm-up, timed or observed."""

    WARM = "warm"
    TIMED = "timed"
    OBSERVED = "observed"


@dataclass
class Entry:
    """What was seen at one line."""

    count: int = 0  # how often
    blocked_seconds: float = 0.0  # the time that the host spent in it
    idle_seconds: float = 0.0  # the estimated time that the device was idle after it
    detail: str = ""  # further facts of the first time, such as a shape
    reduction: Reduction | None = None  # the reduction of the first time

    def add(self, other: Entry) -> None:
        """Add another entry of the same line."""
        self.count += other.count
        self.blocked_seconds += other.blocked_seconds
        self.idle_seconds += other.idle_seconds
        self.detail = self.detail or other.detail
        self.reduction = self.reduction or other.reduction


class Tally:
    """The entries of the current step and of the whole steps before it.

    The host cannot see how long the device is idle. After the host has waited for the device, the device has no work
    until the next launch. The time between the two, plus the time of a launch, counts for the line that waited.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[Key, Entry] = {}
        self._kept: dict[Phase, dict[Key, Entry]] = {phase: {} for phase in Phase}
        self._drained: tuple[Key, float] | None = None  # the last wait, and its end

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
        """Record one occurrence at a line."""
        with self._lock:
            entry = Entry(1, blocked, idle, detail, reduction)
            self._now.setdefault((kind, place), Entry()).add(entry)

    def drained(self, kind: Kind, place: Place, at: float) -> None:
        """Record a wait after which the device has no work left."""
        with self._lock:
            self._drained = ((kind, place), at)

    def launched(self, at: float) -> None:
        """Record a launch."""
        if self._drained is None:  # checked without the lock first: this runs for every operation
            return
        with self._lock:
            if self._drained is not None:
                key, since = self._drained
                self._drained = None
                idle = max(0.0, at - since) + LAUNCH_SECONDS
                self._now.setdefault(key, Entry()).idle_seconds += idle

    def commit(self, phase: Phase) -> None:
        """Keep the entries of the current step: it is over."""
        with self._lock:
            kept = self._kept[phase]
            for key, entry in self._now.items():
                kept.setdefault(key, Entry()).add(entry)
            self._now, self._drained = {}, None  # the next step may be unobserved, so its launches are not seen

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._now, self._drained = {}, None
            self._kept = {phase: {} for phase in Phase}

    def entries(self, phase: Phase | None) -> dict[Key, Entry]:
        """Return the entries of a phase; for None, those that belong to no whole step."""
        with self._lock:
            return dict(self._now if phase is None else self._kept[phase])
