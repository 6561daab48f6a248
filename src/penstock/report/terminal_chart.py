"""Terminal chart: a timeline as lines of characters, coloured in a terminal."""

from __future__ import annotations

import shutil
import sys

import numpy as np
from numpy.typing import NDArray

from penstock.report.bubble_causes import CAUSES
from penstock.report.timeline import Timeline
from penstock.report.units import printable, show_bytes, show_seconds, show_share
from penstock.schedule.actions import KINDS, Kind
from penstock.schedule.rules import RULES, Where

_MOST_LANES = 64
# for each kind, a light background from the 256 terminal colours; the text is black
_COLOR = {Kind.F: 117, Kind.B: 216, Kind.I: 222, Kind.W: 151, Kind.U: 183, Kind.RECOMPUTE: 250}
_IDLE = "·"


def draw_text(timeline: Timeline, *, width: int | None = None, color: bool | None = None) -> str:
    """Return one line per lane (actions as kind and micro-batch, idle time as dots) and a summary.

    By default, lines have the width of the terminal, and kinds have colours if stdout is a terminal.
    """
    columns = max(30, shutil.get_terminal_size((100, 24)).columns if width is None else width)
    colored = sys.stdout.isatty() if color is None else color
    label = len(f"lane {timeline.num_lanes - 1} ")
    on_lane = np.array([RULES[kind].where is Where.LANE for kind in KINDS])[timeline.kind]
    lines = []
    for lane in range(min(timeline.num_lanes, _MOST_LANES)):
        at = np.flatnonzero(on_lane & (timeline.lane == lane))
        lines.append(f"lane {lane}".ljust(label) + _draw_lane(timeline, at, columns - label, colored=colored))
    if on_lane.sum() * 2 > (columns - label) * timeline.num_lanes:  # narrower than two characters on average
        lines.append("(too narrow to show all actions: use a wider terminal or the HTML page)")
    if timeline.num_lanes > _MOST_LANES:
        lines.append(f"({timeline.num_lanes - _MOST_LANES} more lanes)")
    if colored:
        lines.append(_legend(timeline))
    return "\n".join([*lines, summary(timeline)])


def summary(timeline: Timeline) -> str:
    """Return the figures of a timeline as two lines of text, and a third line if the causes of the bubble are known."""
    held = f"peak held: {timeline.peak_micro_batches:.3g} micro-batches of 1/{timeline.num_lanes} of the model"
    if max(timeline.peak_bytes) > 0:
        held += f", {show_bytes(max(timeline.peak_bytes))}"
    name = printable(timeline.name) + (", measured" if timeline.is_measured else "")
    lines = [
        f"{name}: step {show_seconds(timeline.step_seconds)}, {held}",
        f"bubble {show_share(timeline.bubble)} of the makespan, "
        f"{show_share(timeline.span_bubble)} of the longest lane span",
    ]
    if causes := timeline.causes:
        shares = (f"{cause.name} {show_share(getattr(causes, cause.field))}" for cause in CAUSES)
        lines.append(f"of the makespan: {', '.join(shares)}")
    return "\n".join(lines)


def _legend(timeline: Timeline) -> str:
    present = [kind for kind in _COLOR if (timeline.kind == KINDS.index(kind)).any()]
    return "  ".join(f"\033[48;5;{_COLOR[kind]}m {kind.value[0]} \033[0m {kind.words}" for kind in present)


def _draw_lane(timeline: Timeline, at: NDArray[np.int64], columns: int, *, colored: bool) -> str:
    begin, step = float(timeline.start.min()), timeline.step_seconds or 1.0
    scale = columns / step
    at = at[np.argsort(timeline.start[at], kind="stable")]
    first = np.rint((timeline.start[at] - begin) * scale).astype(int)
    last = np.rint((timeline.known_end[at] - begin) * scale).astype(int)
    cells: list[str] = []
    column = 0
    for index, (begins, right) in enumerate(_side_by_side(first.tolist(), last.tolist())):
        left = max(begins, column)
        if right <= left:
            continue  # narrower than one character: only its neighbour is drawn
        cells.append(_IDLE * (left - column))
        span = at[index]
        cells.append(_cell(KINDS[timeline.kind[span]], int(timeline.mb[span]), right - left, colored=colored))
        column = right
    return "".join(cells) + _IDLE * (columns - column)


def _side_by_side(first: list[int], last: list[int]) -> list[tuple[int, int]]:
    """Draw overlapping actions side by side, each with half of their time; a slight measured overlap is ignored."""
    spans = list(zip(first, last, strict=True))
    for index in range(1, len(spans)):
        (left, end), (start, right) = spans[index - 1], spans[index]
        together = max(end, right)
        if 2 * (min(end, right) - start) > min(end - left, right - start) and together > left + 1:
            middle = (left + together) // 2
            spans[index - 1], spans[index] = (left, middle), (middle, together)
    return spans


def _cell(kind: Kind, mb: int, width: int, *, colored: bool) -> str:
    """Return a span as its kind and micro-batch, if they fit; its last character separates it from its neighbour."""
    letter = kind.value[0]
    text = next((t for t in (f"{letter}{mb}", letter) if len(t) < width), letter)
    if not colored:
        return text.ljust(width, "-")[: width - 1] + "|" if width > 1 else letter
    shown = f"{text.ljust(width - 1)}\033[2m▕" if width > 1 else letter
    return f"\033[38;5;16;48;5;{_COLOR.get(kind, 250)}m{shown}\033[0m"
