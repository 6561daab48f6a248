"""Explanation text: the tables of stages and lanes and the prediction, as lines for a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock.report.units import plural, printable, show_bytes, show_count, show_seconds, show_share

if TYPE_CHECKING:
    from penstock.planning.explain.explanation import Crossing, Explanation, StageRow

_BOLD, _DIM, _PLAIN = "\033[1m", "\033[2m", "\033[0m"
_TIGHT = "\N{NO-BREAK SPACE}"
_LEAST_MODULES, _ENOUGH_MODULES = 18, 32  # characters of the column of modules
_MOST_MODULES = 60
_MOST_VALUES = 3  # number of values that a cut names, largest first
_MOST_TIES = 4
_HEADINGS = ("stage", "lane", "modules", "nodes", "parameters", "time", "forward", "backward", "memory")
_NODES, _PARAMETERS = _HEADINGS.index("nodes"), _HEADINGS.index("parameters")


def draw_explanation(explanation: Explanation, *, width: int | None = None, color: bool | None = None) -> str:
    """Return an explanation as text."""
    columns = max(60, shutil.get_terminal_size((110, 24)).columns if width is None else width)
    colored = sys.stdout.isatty() if color is None else color

    def paint(style: str, line: str) -> str:
        return f"{style}{line}{_PLAIN}" if colored and style and line else line

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


def sentences(explanation: Explanation) -> list[str]:
    """Return the sentences around the tables, except the one about the capture."""
    lines = (*_origin(explanation)[1:], *_ties(explanation), *_figures(explanation))
    return [printable(line.replace(_TIGHT, " ")) for line in lines]


def _wrap(text: str, columns: int, *, indent: str = "  ", cut: bool = False) -> list[str]:
    """Break a text into lines, but never inside a shape or between a number and its unit."""
    safe = printable(text.replace(_TIGHT, "\0")).replace("\\x00", _TIGHT)
    lines = textwrap.wrap(safe, columns, subsequent_indent=indent, break_on_hyphens=False, break_long_words=cut)
    return [line.replace(_TIGHT, " ") for line in lines] or [""]


def _bytes(number: float) -> str:
    return show_bytes(number, digits=3).replace(" ", _TIGHT)


def _seconds(seconds: float) -> str:
    return show_seconds(seconds, digits=3).replace(" ", _TIGHT)


def _title(explanation: Explanation) -> str:
    graph = explanation.graph
    weights = sum(p.num_bytes for p in graph.parameters.values() if not p.is_buffer)
    size = f"{show_count(explanation.num_parameters)} parameters ({show_bytes(weights)})"
    return f"{explanation.model}: {size}, {len(graph.nodes)} nodes"


def _origin(explanation: Explanation) -> tuple[str, ...]:
    profile, schedule = explanation.profile, explanation.schedule
    samples = plural(profile.batch_size, "sample")
    counts = f"{plural(schedule.num_lanes, 'lane')}, {plural(schedule.num_mbs, 'micro-batch')} per step"
    return (
        f"captured by {explanation.path}: {explanation.reason}",
        f"{profile.method} on {profile.device or 'an unnamed device'}, micro-batches of {samples}",
        f"schedule {schedule.name} on {counts}, keep: {explanation.keep}",
    )


def _stage_table(explanation: Explanation, columns: int) -> Iterable[tuple[str, str]]:
    """Yield the lines of the table with their styles: one line per stage, and one for the cut after it."""
    rows, widths = _fitted([_HEADINGS, *(_cells(stage) for stage in explanation.stages)], columns)
    indent = " " * (widths[0] + widths[1] + 4)
    yield "head", _line(rows[0], widths)
    for stage, row in zip(explanation.stages, rows[1:], strict=True):
        modules = _wrap(row[2], widths[2], indent="", cut=True)
        yield "", _line([*row[:2], modules[0], *row[3:]], widths)
        for more in modules[1:]:
            yield "", indent + more
        for line in _cut_lines(explanation, stage):
            for part in _wrap(line, max(40, columns - len(indent))):
                yield "cut", indent + part


def _fitted(rows: list[Sequence[str]], columns: int) -> tuple[list[list[str]], list[int]]:
    """Return the cells and column widths; a narrow terminal drops the nodes and the bytes of parameters."""
    for short in (False, True):
        cells = [list(row) for row in rows]
        if short:
            for row in cells:
                row[_PARAMETERS] = row[_PARAMETERS].partition("  ")[0]  # the count of `62.2 k  243 KiB`
                del row[_NODES]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        room = columns - (sum(widths) - widths[2] + 2 * (len(widths) - 1))
        if room >= min(widths[2], _ENOUGH_MODULES):
            break
    widths[2] = max(_LEAST_MODULES, min(widths[2], _MOST_MODULES, room))
    return cells, widths


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
        f"{show_count(stage.num_parameters, digits=3)}  {show_bytes(stage.weight_bytes, digits=3)}",
        show_share(stage.share),
        show_seconds(stage.forward_seconds, digits=3),
        show_seconds(stage.backward_seconds, digits=3),
        show_bytes(stage.memory_bytes, digits=3),
    ]


def _cut_lines(explanation: Explanation, stage: StageRow) -> Iterable[str]:
    """Yield the values that cross the cut after a stage: those that the next stage uses, and those that skip it."""
    at = stage.first_node + stage.num_nodes
    if at == len(explanation.graph.nodes):
        return
    lead = f"↓ cut at {at}, before {explanation.graph.nodes[at].name}: "
    if not stage.crossing:
        yield f"{lead}nothing crosses"
        return
    used = [value for value in stage.crossing if not value.skips_at(stage.index)]
    passing = [value for value in stage.crossing if value.skips_at(stage.index)]
    total = f"{_bytes(stage.crossing_bytes)} per micro-batch"
    yield f"{lead}{total}: {_values(used)}" if used else lead + total
    if passing:
        yield f"↷ skipping the next stage: {_values(passing)}"


def _values(values: Sequence[Crossing]) -> str:
    """Name the largest values; values with the same shape and route are grouped."""
    groups: dict[str, int] = {}
    for value in sorted(values, key=lambda value: -value.num_bytes):
        text = _value(value)
        groups[text] = groups.get(text, 0) + 1
    named = [f"{count}{_TIGHT}×{_TIGHT}{text}" if count > 1 else text for text, count in groups.items()]
    more = sum(list(groups.values())[_MOST_VALUES:])
    return ", ".join(named[:_MOST_VALUES]) + (f", and {more} more" if more else "")


def _value(value: Crossing) -> str:
    seen = " in the example" if value.is_dynamic else ""
    text = f"{value.shape}{seen} {show_bytes(value.num_bytes, digits=3)}".replace(" ", _TIGHT)
    if value.targets == (value.source + 1,) and not value.is_output:
        return text
    targets = [str(target) for target in value.targets] + (["output"] if value.is_output else [])
    return f"{text} (stage {value.source} → {', '.join(targets)})"


def _lane_table(explanation: Explanation) -> Iterable[tuple[str, str]]:
    headings = ["lane", "stages", "time per micro-batch", "memory", "bubble of the makespan"]
    has_limit = explanation.memory_limit is not None
    rows = [
        [
            str(lane.index),
            ",".join(map(str, lane.stages)),
            show_seconds(lane.seconds, digits=3),
            _of_limit(lane.num_bytes, lane.limit_bytes),
            show_share(lane.bubble),
        ]
        for lane in explanation.lanes
    ]
    if has_limit:
        headings[3] = "memory of limit"
    widths = [max(len(heading), *(len(row[at]) for row in rows)) for at, heading in enumerate(headings)]
    yield "head", "  ".join(cell.rjust(width) for cell, width in zip(headings, widths, strict=True))
    for row in rows:
        yield "", "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _of_limit(number: float, limit: float | None) -> str:
    return show_bytes(number, digits=3) + ("" if limit is None else f" of {show_bytes(limit, digits=3)}")


def _ties(explanation: Explanation) -> Iterable[str]:
    for tie in explanation.ties[:_MOST_TIES]:
        names = " = ".join([tie.name, *tie.aliases])
        if len(tie.stages) > 1:
            stages = ", ".join(map(str, tie.stages))
            yield f"tied: {names} ({_bytes(tie.num_bytes)}): stages {stages} hold it and add up its gradient"
        else:
            where = f"stage {tie.stages[0]} holds it" if tie.stages else "no stage uses it"
            yield f"tied: {names} ({_bytes(tie.num_bytes)}): {where}"
    if (more := len(explanation.ties) - _MOST_TIES) > 0:
        yield f"tied: {more} more"


def _proof(explanation: Explanation) -> str:
    """Return what is known about the quality of the cuts."""
    partition, given = explanation.partition, explanation.num_given_cuts
    if given and given == len(partition.cuts):
        return "all cuts were given"
    among = " with the given cuts" if given else ""
    if explanation.schedule.num_stages > explanation.schedule.num_lanes or explanation.schedule.is_bidirectional:
        return f"of the cuts tried{among}, these have the shortest step"
    if partition.is_proved:
        return f"no other cuts{among} are better"
    return f"the best cuts{among} are at most {show_share(partition.gap)} faster"


def _figures(explanation: Explanation) -> Iterable[str]:
    partition, timeline = explanation.partition, explanation.timeline
    lanes = partition.lane_seconds
    slowest, mean = max(lanes), sum(lanes) / len(lanes)
    proof = _proof(explanation)
    yield (
        f"balance: {explanation.balance:.3f}: the slowest lane ({lanes.index(slowest)}) takes {_seconds(slowest)} per "
        f"micro-batch, the mean lane {_seconds(mean)}; {proof}"
    )
    fullest = max(partition.lane_bytes)
    yield (
        f"memory: the fullest lane ({partition.lane_bytes.index(fullest)}) holds {_bytes(fullest)}: "
        "weights, gradients, optimizer state and saved values"
        f"{'' if explanation.schedule.versions is None else '; older versions of weights are not counted'}"
    )
    rate = explanation.samples_per_second
    yield (
        f"predicted step: {_seconds(timeline.step_seconds)}, {rate:,.{0 if rate >= 100 else 1}f} samples per second, "
        f"{explanation.speedup:.2f} × as fast as one lane; bubble {show_share(timeline.bubble)} of the makespan, "
        f"{show_share(timeline.span_bubble)} of the longest lane span"
        f"{'' if explanation.has_links else '; transfers take no time, since no links were given'}"
    )
    yield from explanation.notes
