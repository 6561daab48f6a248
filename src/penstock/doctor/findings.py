"""Findings: turn what was recorded into findings, and decide which are worth reporting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.doctor.doctor_report import Finding, Kind, Report
from penstock.doctor.gpu_busy import Busy
from penstock.doctor.sightings import Entry, Key, Phase
from penstock.doctor.source_lines import NOWHERE, Place
from penstock.report.units import show_share

LEAST_LAUNCH_SHARE = 0.3  # share of a step that the GPU is idle without another cause
LEAST_LOADER_SHARE = 0.1  # share of a step spent waiting for data
_TIMELY = {Kind.STARVED, Kind.LAUNCHES}  # from the timed steps, which observation does not slow down


@dataclass(frozen=True)
class Observations:
    """Everything that was recorded."""

    # the entries of each phase; under None, those that belong to no whole step
    entries: Mapping[Phase | None, Mapping[Key, Entry]]
    step_seconds: Mapping[Phase, Sequence[float]]  # the duration of each step of a phase
    device: str = ""  # the name of the GPU; empty without a GPU
    busy: Busy | None = None  # the work of the GPU in the timed steps
    step_place: Place = NOWHERE  # the line that ends a step
    notes: tuple[str, ...] = ()

    def num_steps(self, phase: Phase | None) -> int:
        """Return the number of whole steps of a phase."""
        return len(self.step_seconds.get(phase, ())) if phase else 0

    @property
    def observed(self) -> Phase | None:
        """The phase to report: the observed steps, or the warm-up steps if the run was too short, or None."""
        return next((phase for phase in (Phase.OBSERVED, Phase.WARM) if self.num_steps(phase)), None)

    @property
    def timed(self) -> Phase | None:
        """The phase whose durations are valid: the timed steps, if there are any."""
        return Phase.TIMED if self.num_steps(Phase.TIMED) else self.observed

    @property
    def whole_seconds(self) -> float:
        """The total duration of these steps, at least as long as the GPU worked: the host may run ahead of the GPU."""
        seconds = sum(self.step_seconds[self.timed]) if self.timed else 0.0
        return max(seconds, self.busy.seconds) if self.busy and self.timed is Phase.TIMED else seconds

    @property
    def step_seconds_reported(self) -> float:
        """The median duration of a step; a mean of few steps would suffer from one slow step."""
        if self.timed is None:
            return 0.0
        seconds = statistics.median(self.step_seconds[self.timed])
        if self.busy is not None and self.timed is Phase.TIMED:
            return max(seconds, self.busy.seconds / self.num_steps(self.timed))
        return seconds


def make_report(seen: Observations) -> Report:
    """Return the report."""
    findings = [*_places(seen), *_starved(seen)]
    findings += _launch_bound(seen, findings)
    notes = _notes(seen, _unexplained(seen, findings))
    findings.sort(key=lambda f: (f.idle_ms, f.blocked_ms, f.per_step), reverse=True)
    return Report(
        findings=tuple(findings),
        num_steps=seen.num_steps(seen.observed),
        step_ms=1e3 * seen.step_seconds_reported,
        idle_share=seen.busy.idle_seconds / seen.busy.seconds if seen.busy and seen.busy.seconds else None,
        device=seen.device,
        notes=notes,
    )


def _places(seen: Observations) -> list[Finding]:
    """Return the findings of each line in the observed steps."""
    entries = seen.entries[seen.observed]
    known = {(place.file, place.line) for kind, place in entries if kind not in (Kind.OTHER, *_TIMELY, Kind.REDUCTION)}
    found = []
    for (kind, place), entry in entries.items():
        if kind in _TIMELY or (kind is Kind.OTHER and (place.file, place.line) in known):
            continue  # torch's warning repeats a known finding
        detail: str | None = entry.detail
        if entry.reduction is not None and seen.device:
            tried = entry.reduction.try_out()
            detail = None if tried is None else ": ".join(filter(None, (entry.detail, tried)))
        if detail is not None:
            costs = entry if seen.device else Entry(entry.count)  # without a GPU there were no waits
            found.append(_finding(kind, place, costs, seen.num_steps(seen.observed), detail))
    return found


def _starved(seen: Observations) -> list[Finding]:
    """Return the data loaders that take a large share of a step: of the GPU's time if there is a GPU."""
    if not seen.whole_seconds:
        return []
    found = []
    for (kind, place), entry in seen.entries[seen.timed].items():
        share = (entry.idle_seconds if seen.device else entry.blocked_seconds) / seen.whole_seconds
        if kind is Kind.STARVED and share > LEAST_LOADER_SHARE:
            detail = f"{show_share(share)} of a step"
            found.append(_finding(kind, place, entry, seen.num_steps(seen.timed), detail))
    return found


def _unexplained(seen: Observations, findings: Sequence[Finding]) -> float:
    """Return the seconds of a step in which the GPU is idle and no finding explains it."""
    if seen.busy is None or not seen.num_steps(Phase.TIMED):
        return 0.0
    explained = sum(finding.idle_ms for finding in findings) * 1e-3
    return max(0.0, seen.busy.idle_seconds / seen.num_steps(Phase.TIMED) - explained)


def _launch_bound(seen: Observations, others: Sequence[Finding]) -> list[Finding]:
    """Return a finding if the GPU is idle for long, in short gaps, and nothing else explains it."""
    num_steps, idle = seen.num_steps(Phase.TIMED), _unexplained(seen, others)
    if seen.busy is None or not num_steps:
        return []
    step, busy, short = (s / num_steps for s in (seen.busy.seconds, seen.busy.busy_seconds, seen.busy.short_seconds))
    idle = min(idle, short)
    if idle <= LEAST_LAUNCH_SHARE * step:
        return []
    kernels = seen.busy.num_kernels / num_steps
    detail = (
        f"in a step of {1e3 * step:.3g} ms, the GPU works for {1e3 * busy:.3g} ms, in {kernels:,.0f} kernels of"
        f" {1e6 * busy / kernels:.3g} µs, and waits {1e3 * short:.3g} ms in the gaps between them"
    )
    entry = Entry(count=num_steps, idle_seconds=idle * num_steps)
    return [_finding(Kind.LAUNCHES, seen.step_place, entry, num_steps, detail)]


def _finding(kind: Kind, place: Place, entry: Entry, num_steps: int, detail: str) -> Finding:
    divisor = max(1, num_steps)  # differs between kinds: some are from the timed steps
    return Finding(
        kind=kind,
        place="" if place == NOWHERE else str(place),
        code=place.code,
        count=entry.count,
        per_step=entry.count / divisor,
        blocked_ms=1e3 * entry.blocked_seconds / divisor,
        idle_ms=1e3 * entry.idle_seconds / divisor,
        advice=kind.advice,
        detail=detail,
        called_from=str(place.caller) if place.caller else "",
    )


def _notes(seen: Observations, unexplained: float) -> tuple[str, ...]:
    notes = list(seen.notes)
    if seen.busy and unexplained * seen.num_steps(Phase.TIMED) > LEAST_LAUNCH_SHARE * seen.busy.seconds:
        notes.append(
            f"For {1e3 * unexplained:.3g} ms of a step the GPU is idle, and no finding below explains it: the host does"
            " something else."
        )
    if not seen.device:
        notes.insert(
            0,
            "There is no GPU, so synchronisations cost nothing. The report lists lines that would wait for a GPU, as"
            " far as this can be known without one.",
        )
    if seen.observed is not None and seen.timed is not Phase.TIMED:
        notes.append("The run was too short for timed steps, so the time of a step includes the time to observe it.")
    if seen.observed is None:
        notes.append("No step ended: neither an optimizer's step() nor the watch's step() was called.")
    elif seen.observed is Phase.WARM:
        notes.append("There were only warm-up steps, so the report is about these.")
    return tuple(notes)
