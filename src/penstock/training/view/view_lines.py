"""View lines: text lines for a step, a validation, a checkpoint, a fault and the end of a training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.report.units import printable, show_bytes, show_seconds, show_share

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Reading, Summary
    from penstock.training.trainer import Trainer
    from penstock.training.view.view_figures import Pace

_WHY = {
    "done": "Done",
    "data ended": "Ended early: the data has no more batches",
    "stopped": "Stopped by a callback",
    "time": "Ended: max_seconds is over",
    "SIGINT": "Stopped by Ctrl-C",
}


def show_loss(loss: float) -> str:
    """Format a loss with about four digits.

    >>> show_loss(2.30259), show_loss(0.000123456), show_loss(float("nan"))
    ('2.303', '0.0001235', 'nan')
    """
    return f"{loss:.3f}" if 0.1 <= abs(loss) < 1e4 else f"{loss:.4g}"


def show_clock(seconds: float) -> str:
    """Format a duration.

    >>> show_clock(75.4), show_clock(100_000)
    ('0:01:15', '1 day, 3:46:40')
    """
    return str(timedelta(seconds=round(seconds)))


def begin_line(trainer: Trainer) -> str:
    """Describe the training at its start."""
    schedule, options = trainer.pipe.schedule, trainer.options
    lanes = f"{schedule.num_lanes} lane{'s' if schedule.num_lanes > 1 else ''}"
    parts = f"{printable(schedule.name)}, {lanes}, {schedule.num_mbs} micro-batches, {options.steps} steps"
    kept = trainer.pipe.plan.source
    plan = f"; cuts from {_relative(Path(kept))}" if kept else ""
    return f"training: {parts}, in {_relative(trainer.folder.path)}{plan}"


def memory_kind(trainer: Trainer) -> str:
    """Return the kind of memory that `lane_memory.lane_bytes` reports."""
    pipe = trainer.pipe
    if pipe.devices[pipe.lanes[0]].type == "cuda":
        return "peak allocated"
    return "resident" if len(pipe.lanes) < pipe.schedule.num_lanes else "held"


def step_line(reading: Reading, pace: Pace, memory: str = "held") -> str:
    """Describe a step; `memory` is the kind of memory in `lane_bytes`."""
    parts = [f"loss {show_loss(reading.loss)}", *_shown_metrics(reading.metrics), pace.speed_text]
    if reading.timeline is not None:
        parts.append(f"bubble {show_share(reading.timeline.bubble)}")
    parts.append(f"{show_seconds(pace.step_seconds, digits=3)} per step")
    if reading.lane_bytes:
        parts.append(f"at most {show_bytes(max(reading.lane_bytes), digits=3)} {memory} per lane")
    return f"step {reading.step:>{len(str(reading.steps))}} of {reading.steps}: {', '.join(parts)}"


def evaluate_line(figures: Mapping[str, Any]) -> str:
    """Describe the result of a validation."""
    loss, samples, seconds = figures["validation_loss"], figures.get("samples"), figures.get("seconds")
    facts = [] if samples is None else [f"{samples:,} samples"]
    facts += [] if seconds is None else [show_seconds(seconds, digits=3)]
    found = ", ".join([f"validation loss {show_loss(loss)}", *_shown_metrics(figures.get("metrics", {}))])
    return f"step {figures['step']}: {found}" + (f" ({', '.join(facts)})" if facts else "")


def _shown_metrics(metrics: Mapping[str, float]) -> list[str]:
    return [f"{printable(name)} {show_loss(value)}" for name, value in metrics.items()]


def save_line(step: int, folder: Path) -> str:
    """Report a complete checkpoint."""
    return f"step {step}: checkpoint {_relative(folder)}"


def fault_line(fault: Mapping[str, Any]) -> str:
    """Describe a fault; its message may have several lines."""
    message = "\n".join(map(printable, str(fault.get("message", "")).splitlines()))
    head = f"fault ({printable(str(fault.get('kind', 'unknown')))})"
    return f"{head}: {message}" if message.startswith("step ") else f"step {fault.get('step')}: {head}: {message}"


def summary_lines(
    summary: Summary, *, first_loss: float | None, speed: str, events: Path | None, again: str | None
) -> list[str]:
    """Describe the result of a training, the location of its files, and how to continue: with the command `again`."""
    why = _WHY.get(summary.status, f"Ended by {printable(summary.status)}")
    head, clock = f"{why}: {summary.step} of {summary.steps} steps", f", in {show_clock(summary.seconds)}"
    if summary.restarts:
        times = "once" if summary.restarts == 1 else f"{summary.restarts} times"
        clock += f"; the processes were restarted {times}, and this is the time since then"
    if summary.is_done and summary.resumed_from is not None and summary.resumed_from >= summary.steps:
        head = (
            f"Nothing was trained: already at step {summary.resumed_from}, and steps = {summary.steps}; increase steps"
        )
        clock = ""
    elif summary.resumed_from is not None:
        head += f", {summary.resumed_from} of them before"
    rows = [("loss", _change(first_loss, summary.loss))]
    rows.append(("validation", "" if summary.validation is None else show_loss(summary.validation)))
    rows.append(("speed", speed))
    rows.append(("checkpoints", _newest(summary.checkpoints)))
    rows.append(("timelines", _newest(summary.timelines)))
    rows.append(("events", "" if events is None else _relative(events)))
    rows.append(("skipped", f"the updates of {_numbers(summary.skipped)}" if summary.skipped else ""))
    rows += [("not saved", "; ".join(map(printable, failure.splitlines()))) for failure in summary.failures]
    lines = [head + clock]
    lines += [f"  {name:<12}{text}" for name, text in rows if text]
    if not summary.is_done and summary.checkpoints:
        how = printable(again) if again else f"run it again with the same folder, {_relative(summary.folder)}"
        lines.append(f"To continue: {how}")
    return lines


def _change(first: float | None, last: float | None) -> str:
    if last is None:
        return "" if first is None else show_loss(first)
    return show_loss(last) if first is None else f"{show_loss(first)} → {show_loss(last)}"


def _newest(paths: tuple[Path, ...]) -> str:
    if not paths:
        return ""
    more = len(paths) - 1
    return _relative(paths[-1]) + (f" and {more} before" if more else "")


def _numbers(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:10]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 10} more" if len(steps) > 10 else "")


def _relative(path: Path) -> str:
    """Return a path relative to the current folder if possible."""
    with suppress(ValueError, OSError):
        path = path.resolve().relative_to(Path.cwd())
    return printable(str(path))
