"""Report: what the doctor found, as data, as text and as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from penstock.doctor.finding_kinds import ABOUT, Kind
from penstock.report.units import printable, show_share

__all__ = ["Finding", "Report"]

_BOLD, _DIM, _PLAIN = "\033[1m", "\033[2m", "\033[0m"
_INDENT = "    "


@dataclass(frozen=True)
class Finding:
    """One place, and what it does.

    Attributes:
        kind: what it does.
        place: file and line; empty for what has no line.
        code: the text of that line.
        count: times in all steps that were looked at.
        per_step: times a step.
        blocked_ms: milliseconds a step that the host spent in it; of what is in no whole step, in all.
        idle_ms: milliseconds a step that the GPU had nothing to do because of it, about; likewise.
        advice: what to do instead.
        detail: what is known besides, as a shape.
        called_from: the line of one's own code that leads there, where the place is in a library.
    """

    kind: Kind
    place: str
    code: str
    count: int
    per_step: float
    blocked_ms: float
    idle_ms: float
    advice: str
    detail: str = ""
    called_from: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True)
class Report:
    """What was found in some steps.

    Attributes:
        findings: the costliest first.
        num_steps: steps that were looked at.
        step_ms: milliseconds of a step, the median; 0 where no step was seen.
        idle_share: of a step, that the GPU had nothing to do; None where it was not measured.
        device: the GPU; empty where there is none, and synchronisations cost nothing.
        notes: what to know besides.
    """

    findings: tuple[Finding, ...]
    num_steps: int
    step_ms: float
    idle_share: float | None
    device: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "device": self.device,
            "steps": self.num_steps,
            "step_ms": self.step_ms,
            "idle_share": self.idle_share,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self, *, width: int | None = None, color: bool | None = None) -> str:
        """Return it as text: a paragraph for each finding.

        Args:
            width: characters a line; by default the terminal's.
            color: by default where the output is a terminal.
        """
        columns = max(40, shutil.get_terminal_size((110, 24)).columns if width is None else width)
        colored = sys.stdout.isatty() if color is None else color

        def wrapped(text: str, style: str, indent: str = "") -> list[str]:
            lines = textwrap.wrap(
                printable(text), columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
            )
            return [f"{style}{line}{_PLAIN}" if colored and style else line for line in lines]

        lines = wrapped(self._summary, _BOLD)
        for note in self.notes:
            lines += wrapped(note, "")
        for finding in self.findings:
            lines += ["", *wrapped(self._headline(finding), _BOLD)]
            for text, style in ((finding.code, _DIM), (_aside(finding), ""), (finding.advice, "")):
                lines += wrapped(text, style, _INDENT)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.to_text()

    @property
    def _summary(self) -> str:
        found = _times(len(self.findings), "finding") if self.findings else "Nothing found"
        steps = f"in {_times(self.num_steps, 'step')}" if self.num_steps else "(not one whole step was run)"
        parts = [f"{found} {steps}{f' on {self.device}' if self.device else ''}"]
        if self.step_ms:
            parts.append(f"a step takes {self.step_ms:.3g} ms")
        if self.idle_share is not None:
            parts.append(f"of which the GPU has nothing to do for {show_share(self.idle_share)}")
        return ", ".join(parts)

    def _headline(self, finding: Finding) -> str:
        what = ABOUT[finding.kind].words
        often = _often(finding) if self.num_steps else _times(finding.count, "time")
        costs = []
        if self.device and finding.blocked_ms:
            costs.append(f"the host spends {finding.blocked_ms:.3g} ms in it")
        if self.device and finding.idle_ms:
            costs.append(f"the GPU is idle for about {finding.idle_ms:.3g} ms")
        parts = [f"{finding.place}: {what}" if finding.place else what, often]
        if costs:
            parts.append(" and ".join(costs) + (" a step" if self.num_steps else ""))
        return "; ".join(parts)


def _often(finding: Finding) -> str:
    """Return how often something happens; what is rarer than once a step, by the steps that were looked at."""
    if finding.per_step >= 1:
        return f"{finding.per_step:.3g} a step"
    steps = round(finding.count / finding.per_step)
    times = {1: "once", 2: "twice"}.get(finding.count, f"{finding.count} times")
    return f"{times} in {steps} steps"


def _aside(finding: Finding) -> str:
    parts = [finding.detail, f"called from {finding.called_from}" if finding.called_from else ""]
    return "; ".join(filter(None, parts))


def _times(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
