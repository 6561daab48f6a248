"""Doctor report: the kinds of findings, and the findings as data, as text and as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Self

from penstock.report.units import plural, printable, show_share

_BOLD, _DIM, _PLAIN = "\033[1m", "\033[2m", "\033[0m"
_INDENT = "    "


class Kind(Enum):
    """The kind of a finding; `words` describe it, and `advice` says what to do instead."""

    _value_: str
    words: str
    advice: str

    def __new__(cls, value: str, words: str = "", advice: str = "") -> Self:  # noqa: D102
        kind = object.__new__(cls)
        kind._value_, kind.words, kind.advice = value, words, advice
        return kind

    ITEM = (
        "item",
        "reads a value",
        "The host waits until the GPU has the value. Keep sums on the GPU (total += loss.detach(), or penstock.Metrics)"
        " and read them only every few steps; use torch.where instead of if.",
    )
    PRINT = (
        "print",
        "prints a tensor",
        "Printing a tensor reads it, so the host waits for the GPU. Print only every few steps.",
    )
    TO_HOST = (
        "copy_to_host",
        "copies to the host",
        "The host waits until all work before the copy is done. Copy less often, or into pinned memory with"
        " non_blocking=True, and read it one step later.",
    )
    SHAPE = (
        "shape_from_values",
        "makes a tensor whose size depends on values",
        "The host needs the size, so it waits for the GPU. Keep the size fixed: use torch.where, masked_fill or a"
        " product with the mask, or pass the size to nonzero_static or repeat_interleave(output_size=).",
    )
    UNPINNED = (
        "unpinned_copy",
        "copies from memory that is not pinned",
        "The GPU cannot read this memory directly: the host makes another copy, and waits. Use"
        " DataLoader(pin_memory=True) and .to(device, non_blocking=True), or penstock.feed; create constants on the GPU"
        " (device=).",
    )
    BLOCKING = (
        "blocking_copy",
        "copies to the GPU and waits",
        "The memory is pinned, so with non_blocking=True the host does not wait.",
    )
    WAIT = (
        "synchronize",
        "waits for the GPU",
        "This is rarely needed: streams keep their order, and copies to the host wait by themselves. To measure time,"
        " use penstock.timing.measure.",
    )
    OTHER = ("other_synchronisation", "synchronises", "Torch reports that this line waits for the GPU.")
    REDUCTION = (
        "strided_reduction",
        "reduces a dimension that is not the innermost in memory",
        "Reducing the innermost dimension is fastest, because neighbours in memory are read together. If you can choose"
        " the layout, put the reduced dimension last.",
    )
    LAUNCHES = (
        "launch_bound",
        "the GPU waits for launches",
        "The host needs longer to launch a kernel than the GPU to run it. CUDA graphs launch many kernels at once: use"
        " penstock.Pipeline(graphs=True) or torch.compile(mode='reduce-overhead'). Larger batches help too.",
    )
    STARVED = (
        "data_loader",
        "waits for data",
        "Give the DataLoader more workers (num_workers, prefetch_factor, persistent_workers=True) or do less work per"
        " sample; penstock.feed copies the next batch during the current step.",
    )


@dataclass(frozen=True)
class Finding:
    """A finding at one line.

    Attributes:
        kind: the kind of the finding.
        place: file and line; empty if there is no line.
        code: the text of the line.
        count: how often it occurred in all observed steps.
        per_step: how often it occurs per step.
        blocked_ms: milliseconds per step that the host spent in it; outside whole steps, the total.
        idle_ms: estimated milliseconds per step that the GPU was idle because of it; outside whole steps, the total.
        advice: what to do instead.
        detail: further facts, such as a shape.
        called_from: the line of your own code that led to it, if the place is in a library.
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
        """Return the finding as plain data."""
        return {**asdict(self), "kind": self.kind.value}


@dataclass(frozen=True)
class Report:
    """The findings of some steps.

    Attributes:
        findings: the findings, the costliest first.
        num_steps: the number of observed steps.
        step_ms: the median time of a step in milliseconds; 0 if no step was seen.
        idle_share: the share of a step in which the GPU is idle; None if it was not measured.
        device: the name of the GPU; empty without a GPU, where synchronisations cost nothing.
        notes: further remarks.
    """

    findings: tuple[Finding, ...]
    num_steps: int
    step_ms: float
    idle_share: float | None
    device: str
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "device": self.device,
            "steps": self.num_steps,
            "step_ms": self.step_ms,
            "idle_share": self.idle_share,
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(self, *, width: int | None = None, color: bool | None = None) -> str:
        """Return the report as text, with one paragraph per finding.

        Args:
            width: the line width; by default that of the terminal.
            color: whether to use colours; by default, if the output is a terminal.
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
        found = plural(len(self.findings), "finding") if self.findings else "Nothing found"
        steps = f"in {plural(self.num_steps, 'step')}" if self.num_steps else "(no whole step ran)"
        parts = [f"{found} {steps}{f' on {self.device}' if self.device else ''}"]
        if self.step_ms:
            parts.append(f"a step takes {self.step_ms:.3g} ms")
        if self.idle_share is not None:
            parts.append(f"and the GPU is idle for {show_share(self.idle_share)} of it")
        return ", ".join(parts)

    def _headline(self, finding: Finding) -> str:
        what = finding.kind.words
        often = _often(finding) if self.num_steps else plural(finding.count, "time")
        costs = []
        if self.device and finding.blocked_ms:
            costs.append(f"the host spends {finding.blocked_ms:.3g} ms in it")
        if self.device and finding.idle_ms:
            costs.append(f"the GPU is idle for about {finding.idle_ms:.3g} ms")
        parts = [f"{finding.place}: {what}" if finding.place else what, often]
        if costs:
            parts.append(" and ".join(costs) + (" per step" if self.num_steps else ""))
        return "; ".join(parts)


def _often(finding: Finding) -> str:
    """Return how often a finding occurs: per step, or in all observed steps if it is rarer than once per step."""
    if finding.per_step >= 1:
        return f"{finding.per_step:.3g} per step"
    steps = round(finding.count / finding.per_step)
    times = {1: "once", 2: "twice"}.get(finding.count, f"{finding.count} times")
    return f"{times} in {steps} steps"


def _aside(finding: Finding) -> str:
    parts = [finding.detail, f"called from {finding.called_from}" if finding.called_from else ""]
    return "; ".join(filter(None, parts))
