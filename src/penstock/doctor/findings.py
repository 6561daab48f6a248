"""Findings: from what was counted to what is said, with the rules for what is worth saying."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.doctor.doctor_report import Finding, Report
from penstock.doctor.finding_kinds import ABOUT, Kind
from penstock.doctor.gpu_busy import Busy
from penstock.doctor.sightings import Entry, Key, Phase
from penstock.doctor.source_lines import NOWHERE, Place
from penstock.report.units import show_share

__all__ = ["LEAST_LAUNCH_SHARE", "LEAST_LOADER_SHARE", "Seen", "make_report"]

LEAST_LAUNCH_SHARE = 0.3  # of a step, that the GPU is idle with nothing else to blame
LEAST_LOADER_SHARE = 0.1  # of a step, that data is waited for
_TIMELY = {Kind.STARVED, Kind.LAUNCHES}  # told from steps that are not slowed down by looking


@dataclass(frozen=True)
class Seen:
    """All that was counted.

    Attributes:
        entries: of each phase; of None, what belongs to no whole step.
        step_seconds: how long each step of a phase took.
        device: the GPU's name; empty where there is none.
        busy: what the GPU did in the steps that were timed.
        step_place: the line that ends a step.
        notes: what to say besides.
    """

    entries: Mapping[Phase | None, Mapping[Key, Entry]]
    step_seconds: Mapping[Phase, Sequence[float]]
    device: str = ""
    busy: Busy | None = None
    step_place: Place = NOWHERE
    notes: tuple[str, ...] = field(default=())

    def num_steps(self, phase: Phase | None) -> int:
        """Return how many whole steps a phase had."""
        return len(self.step_seconds.get(phase, ())) if phase else 0

    @property
    def looked(self) -> Phase | None:
        """The steps to speak of: those looked at; where a run was too short for any, those to warm up; or none."""
        return next((phase for phase in (Phase.LOOKED, Phase.WARM) if self.num_steps(phase)), None)

    @property
    def timed(self) -> Phase | None:
        """The steps whose length means something: those that nobody looked at, if there are any."""
        return Phase.TIMED if self.num_steps(Phase.TIMED) else self.looked

    @property
    def whole_seconds(self) -> float:
        """How long these steps took together: a host that only asks runs ahead of a GPU that works."""
        seconds = sum(self.step_seconds[self.timed]) if self.timed else 0.0
        return max(seconds, self.busy.seconds) if self.busy and self.timed is Phase.TIMED else seconds

    @property
    def step_seconds_told(self) -> float:
        """How long a step takes: the median, since one slow step would spoil the mean of few."""
        if self.timed is None:
            return 0.0
        seconds = statistics.median(self.step_seconds[self.timed])
        if self.busy is not None and self.timed is Phase.TIMED:
            return max(seconds, self.busy.seconds / self.num_steps(self.timed))
        return seconds


def make_report(seen: Seen) -> Report:
    """Return what is worth saying."""
    findings = [*_places(seen), *_starved(seen)]
    findings += _launch_bound(seen, findings)
    notes = _notes(seen, _unexplained(seen, findings))
    findings.sort(key=lambda f: (f.idle_ms, f.blocked_ms, f.per_step), reverse=True)
    return Report(
        findings=tuple(findings),
        num_steps=seen.num_steps(seen.looked),
        step_ms=1e3 * seen.step_seconds_told,
        idle_share=seen.busy.idle_seconds / seen.busy.seconds if seen.busy and seen.busy.seconds else None,
        device=seen.device,
        notes=notes,
    )


def _places(seen: Seen) -> list[Finding]:
    """Return what each place did in the steps that were looked at."""
    entries = seen.entries[seen.looked]
    known = {(place.file, place.line) for kind, place in entries if kind not in (Kind.OTHER, *_TIMELY, Kind.REDUCTION)}
    found = []
    for (kind, place), entry in entries.items():
        if kind in _TIMELY or (kind is Kind.OTHER and (place.file, place.line) in known):
            continue  # torch warns of what was seen by its name too
        detail: str | None = entry.detail
        if entry.reduction is not None and seen.device:
            tried = entry.reduction.try_out()
            detail = None if tried is None else ": ".join(filter(None, (entry.detail, tried)))
        if detail is not None:
            costs = entry if seen.device else Entry(entry.count)  # without a GPU nothing was waited for
            found.append(_finding(kind, place, costs, seen.num_steps(seen.looked), detail))
    return found


def _starved(seen: Seen) -> list[Finding]:
    """Return the data loaders that take too much of a step: of the GPU's time, where there is one."""
    if not seen.whole_seconds:
        return []
    found = []
    for (kind, place), entry in seen.entries[seen.timed].items():
        share = (entry.idle_seconds if seen.device else entry.blocked_seconds) / seen.whole_seconds
        if kind is Kind.STARVED and share > LEAST_LOADER_SHARE:
            detail = f"{show_share(share)} of a step"
            found.append(_finding(kind, place, entry, seen.num_steps(seen.timed), detail))
    return found


def _unexplained(seen: Seen, findings: Sequence[Finding]) -> float:
    """Return for how many seconds of a step the GPU is idle without a finding that explains it."""
    if seen.busy is None or not seen.num_steps(Phase.TIMED):
        return 0.0
    explained = sum(finding.idle_ms for finding in findings) * 1e-3
    return max(0.0, seen.busy.idle_seconds / seen.num_steps(Phase.TIMED) - explained)


def _launch_bound(seen: Seen, others: Sequence[Finding]) -> list[Finding]:
    """Return that the GPU waits for launches, if it is idle for long, in short gaps, and nothing else explains it."""
    num_steps, idle = seen.num_steps(Phase.TIMED), _unexplained(seen, others)
    if seen.busy is None or not num_steps:
        return []
    step, busy, short = (s / num_steps for s in (seen.busy.seconds, seen.busy.busy_seconds, seen.busy.short_seconds))
    idle = min(idle, short)
    if idle <= LEAST_LAUNCH_SHARE * step:
        return []
    kernels = seen.busy.num_kernels / num_steps
    detail = (
        f"of {1e3 * step:.3g} ms a step the GPU works {1e3 * busy:.3g} ms, in {kernels:,.0f} kernels of"
        f" {1e6 * busy / kernels:.3g} µs, and waits {1e3 * short:.3g} ms in the gaps between them"
    )
    entry = Entry(count=num_steps, idle_seconds=idle * num_steps)
    return [_finding(Kind.LAUNCHES, seen.step_place, entry, num_steps, detail)]


def _finding(kind: Kind, place: Place, entry: Entry, num_steps: int, detail: str) -> Finding:
    divisor = max(1, num_steps)  # not the same for all kinds: some are told from the steps that were timed
    return Finding(
        kind=kind,
        place="" if place == NOWHERE else str(place),
        code=place.code,
        count=entry.count,
        per_step=entry.count / divisor,
        blocked_ms=1e3 * entry.blocked_seconds / divisor,
        idle_ms=1e3 * entry.idle_seconds / divisor,
        advice=ABOUT[kind].advice,
        detail=detail,
        called_from=str(place.caller) if place.caller else "",
    )


def _notes(seen: Seen, unexplained: float) -> tuple[str, ...]:
    notes = list(seen.notes)
    if seen.busy and unexplained * seen.num_steps(Phase.TIMED) > LEAST_LAUNCH_SHARE * seen.busy.seconds:
        notes.append(
            f"For {1e3 * unexplained:.3g} ms of a step the GPU has nothing to do and nothing below explains it: the"
            " host does something else then."
        )
    if not seen.device:
        notes.insert(
            0,
            "No GPU here, so synchronisations cost nothing; looked for are places that would wait for one, as far as"
            " can be told without it.",
        )
    if seen.looked is not None and seen.timed is not Phase.TIMED:
        notes.append("The run was too short to time steps that are not watched: a step's time has the watch's in it.")
    if seen.looked is None:
        notes.append("No step ended: no optimizer's step() was called, nor that of the watch.")
    elif seen.looked is Phase.WARM:
        notes.append("There were no steps after those to warm up, so these are told.")
    return tuple(notes)
