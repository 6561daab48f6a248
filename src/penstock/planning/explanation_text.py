"""Explanation, text: the tables of stages and lanes and the prediction, as lines for a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.report.format import printable, show_bytes, show_count, show_seconds, show_share
from penstock.report.stages import Crossing, StageRow

if TYPE_CHECKING:
    from penstock.planning.explanation import Explanation

__all__ = ["draw_explanation"]

_BOLD, _DIM, _PLAIN = "\033[1m", "\033[2m", "\033[0m"
_LEAST_MODULES = 18  # characters of the column of modules
_MOST_MODULES = 60
_MOST_VALUES = 3  # that a cut names; the largest come first
_MOST_TIES = 4
_HEADINGS = ("stage", "lane", "modules", "nodes", "parameters", "time", "forward", "backward", "memory")


def draw_explanation(explanation: Explanation, *, width: int | None = None, color: bool | None = None) -> str:
    """Return an explanation as text."""
    columns = max(60, shutil.get_terminal_size((110, 24)).columns if width is None else width)
    colored = sys.stdout.isatty() if color is None else color

    def paint(style: str, line: str) -> str:
        return f"{style}{line}{_PLAIN}" if colored and line else line

    lines = [paint(_BOLD, line) for line in _wrap(_title(explanation), columns)]
    for line in _origin(explanation):
        lines += _wrap(line, columns)
    lines.append("")
    for style, line in _stage_table(explanation, columns):
        lines.append(paint({"head": _BOLD, "cut": _DIM}.get(style, ""), line))
    if any(len(lane.stages) > 1 for lane in explanation.lanes) or explanation.memory_limit is not None:
        lines.append("")
        for style, line in _lane_table(explanation):
            lines.append(paint({"head": _BOLD}.get(style, ""), line))
    lines.append("")
    for line in (*_ties(explanation), *_figures(explanation)):
        lines += _wrap(line, columns)
    return "\n".join(lines)


def _wrap(text: str, columns: int) -> list[str]:
    return textwrap.wrap(printable(text), columns, subsequent_indent="  ", break_on_hyphens=False) or [""]


def _title(explanation: Explanation) -> str:
    graph = explanation.graph
    weights = sum(p.num_bytes for p in graph.parameters.values() if not p.is_buffer)
    size = f"{show_count(explanation.num_parameters)} parameters ({show_bytes(weights)})"
    return f"{explanation.model}: {size}, {len(graph.nodes)} nodes"


def _origin(explanation: Explanation) -> Iterable[str]:
    profile, schedule = explanation.profile, explanation.schedule
    yield f"captured by {explanation.path}: {explanation.reason}"
    yield f"{profile.method} on {profile.device or 'an unnamed device'}, micro-batches of {_plural(profile.batch_size, 'sample')}"
    counts = f"{_plural(schedule.num_lanes, 'lane')}, {_plural(schedule.num_mbs, 'micro-batch')} a step"
    yield f"schedule {schedule.name} on {counts}, keep: {explanation.keep}"


def _plural(number: int, word: str) -> str:
    ending = "es" if word.endswith("ch") else "s"
    return f"{number} {word}{'' if number == 1 else ending}"


def _stage_table(explanation: Explanation, columns: int) -> Iterable[tuple[str, str]]:
    """Yield the lines of the table, each with its style: a line a stage, and one for the cut after it."""
    rows = [_cells(stage) for stage in explanation.stages]
    widths = [max(len(heading), *(len(row[at]) for row in rows)) for at, heading in enumerate(_HEADINGS)]
    rest = sum(widths) - widths[2] + 2 * (len(widths) - 1)
    widths[2] = max(_LEAST_MODULES, min(widths[2], _MOST_MODULES, columns - rest))
    yield "head", _line(_HEADINGS, widths)
    for stage, row in zip(explanation.stages, rows, strict=True):
        modules = textwrap.wrap(row[2], widths[2], break_on_hyphens=False) or [""]
        yield "", _line([*row[:2], modules[0], *row[3:]], widths)
        indent = " " * (widths[0] + widths[1] + 4)
        for more in modules[1:]:
            yield "", indent + more
        for line in _cut_lines(stage, len(explanation.ranges) - 1):
            for part in textwrap.wrap(
                line, max(40, columns - len(indent)), subsequent_indent="  ", break_on_hyphens=False
            ):
                yield "cut", indent + part


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.ljust(width) if at == 2 else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(aligned).rstrip()


def _cells(stage: StageRow) -> list[str]:
    return [
        str(stage.index),
        ",".join(map(str, stage.lanes)),
        printable(stage.modules_text),
        str(stage.num_nodes),
        f"{show_count(stage.num_parameters)}  {show_bytes(stage.weight_bytes)}",
        show_share(stage.share),
        show_seconds(stage.forward_seconds),
        show_seconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
    ]


def _cut_lines(stage: StageRow, last: int) -> Iterable[str]:
    """Say what crosses the cut after a stage: what the next one uses, and what only passes by."""
    if stage.index == last:
        return
    at = stage.first_node + stage.num_nodes
    if not stage.crossing:
        yield f"↓ cut at {at}: nothing crosses"
        return
    total = f"{show_bytes(stage.crossing_bytes)} a micro-batch"
    used = [value for value in stage.crossing if not value.skips_at(stage.index)]
    passing = [value for value in stage.crossing if value.skips_at(stage.index)]
    yield f"↓ cut at {at}: {total}: {_values(used, last)}" if used else f"↓ cut at {at}: {total}"
    if passing:
        yield f"↷ passing by: {_values(passing, last)}"


def _values(values: Sequence[Crossing], last: int) -> str:
    """Name the largest values, those of one shape and one way together."""
    groups: dict[str, list[Crossing]] = {}
    for value in sorted(values, key=lambda value: -value.num_bytes):
        groups.setdefault(_value(value, last), []).append(value)
    named = [f"{len(group)} × {text}" if len(group) > 1 else text for text, group in groups.items()]
    more = sum(len(group) for group in list(groups.values())[_MOST_VALUES:])
    return ", ".join(named[:_MOST_VALUES]) + (f", and {more} more" if more else "")


def _value(value: Crossing, last: int) -> str:
    seen = " as seen" if value.is_dynamic else ""
    text = f"{printable(value.shape)}{seen} {show_bytes(value.num_bytes)}"
    if value.targets == (value.source + 1,):
        return text
    if not value.targets:
        return f"{text} (stage {value.source} → output)"
    targets = [str(target) for target in value.targets] + (["output"] if value.is_output and last else [])
    return f"{text} (stage {value.source} → {', '.join(targets)})"


def _lane_table(explanation: Explanation) -> Iterable[tuple[str, str]]:
    headings = ["lane", "stages", "time a micro-batch", "memory", "bubble over the makespan"]
    has_limit = explanation.memory_limit is not None
    rows = [
        [
            str(lane.index),
            ",".join(map(str, lane.stages)),
            show_seconds(lane.seconds),
            show_bytes(lane.num_bytes) + (f" of {show_bytes(lane.limit_bytes)}" if lane.limit_bytes is not None else ""),
            show_share(lane.bubble),
        ]
        for lane in explanation.lanes
    ]
    if has_limit:
        headings[3] = "memory of its limit"
    widths = [max(len(heading), *(len(row[at]) for row in rows)) for at, heading in enumerate(headings)]
    yield "head", "  ".join(cell.rjust(width) for cell, width in zip(headings, widths, strict=True))
    for row in rows:
        yield "", "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _ties(explanation: Explanation) -> Iterable[str]:
    for tie in explanation.ties[:_MOST_TIES]:
        names = " = ".join([tie.name, *tie.aliases])
        if len(tie.stages) > 1:
            stages = ", ".join(map(str, tie.stages))
            yield f"tied: {names} ({show_bytes(tie.num_bytes)}): stages {stages} hold it, and add up its gradient"
        else:
            where = f"stage {tie.stages[0]} holds it" if tie.stages else "no stage uses it"
            yield f"tied: {names} ({show_bytes(tie.num_bytes)}): {where}"
    if (more := len(explanation.ties) - _MOST_TIES) > 0:
        yield f"tied: {more} more"


def _figures(explanation: Explanation) -> Iterable[str]:
    partition, timeline = explanation.partition, explanation.timeline
    slowest = partition.lane_seconds.index(max(partition.lane_seconds))
    proof = "no cuts are better" if partition.is_proved else f"at most {show_share(partition.gap)} from the best cuts"
    yield (
        f"balance: {explanation.balance:.3f} (lane {slowest} takes {show_seconds(max(partition.lane_seconds))} a "
        f"micro-batch, over the mean of all lanes); {proof}"
    )
    fullest = partition.lane_bytes.index(max(partition.lane_bytes))
    yield f"memory: lane {fullest} holds the most, {show_bytes(max(partition.lane_bytes))}: weights, gradients, optimizer, saved"
    yield (
        f"predicted step: {show_seconds(timeline.step_seconds)}, {explanation.samples_per_second:,.4g} samples a second, "
        f"{explanation.speedup:.2f} × one lane; bubble {show_share(timeline.bubble)} over the makespan, "
        f"{show_share(timeline.span_bubble)} over the longest lane span"
    )
