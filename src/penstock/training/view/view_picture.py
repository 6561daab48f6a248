"""View picture: the current state of a training in a terminal: figures, memory, the work of the lanes, and a bar."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.report.terminal_chart import draw_text, summary
from penstock.report.units import show_bytes, show_seconds, show_share
from penstock.training.view.view_figures import Pace, Sparkline
from penstock.training.view.view_lines import show_clock, show_loss

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline
    from penstock.training.callbacks.callback import Reading

_GAP, _SPARK = "   ", 16
_LEAST_BAR, _MOST_BAR = 4, 40
_LEAST_LANES = 2  # fewer lanes of many would say too little


class Picture:
    """Everything known about a training, drawn to fit the terminal; `Screen` describes the arguments."""

    def __init__(self, steps: int, *, step: int = 0, memory: str = "held") -> None:
        self.steps, self.step, self.memory = steps, step, memory
        self.pace, self._loss_line = Pace(), Sparkline(_SPARK)
        self.reading: Reading | None = None
        self.validation: float | None = None
        self._begin = time.monotonic()
        self._recorded_at = 0
        self._strip: tuple[Timeline, int, list[Text]] | None = None

    def add(self, reading: Reading) -> None:
        """Add a step."""
        before = None if self.reading is None else self.reading.timeline
        if reading.timeline is not before:
            self._recorded_at = reading.step
        self.reading, self.step = reading, reading.step
        self.pace.add(reading)
        self._loss_line.add(reading.loss)

    def draw(self, width: int, height: int, *, is_last: bool = False) -> RenderableType:
        """Return the picture for this many columns and lines; the last picture, which stays, has no lanes."""
        space = height - 2  # besides the bar and the cursor's line
        top = [*self._figures(width), *self._memory(width)][:space]
        lanes = [] if is_last else self._lanes(width, space - len(top))
        return Group(*top, *lanes, self._bar(width, is_last=is_last))

    # ---- the parts

    def _bar(self, width: int, *, is_last: bool) -> RenderableType:
        to_go = self.pace.seconds_to_go
        count = Text(f"{self.step}/{self.steps} steps")
        clock = Text(show_clock(time.monotonic() - self._begin), style="dim")
        left = Text(f"to go {'?' if to_go is None else show_clock(to_go)}", style="cyan")
        words = [Text("training"), count, clock, *([] if is_last else [left])]
        for least in (words[0], clock):  # optional words
            if _LEAST_BAR + 1 + _width_of(words) >= width:
                words.remove(least)
        space = max(_LEAST_BAR, min(_MOST_BAR, width - 2 - _width_of(words)))
        bar = ProgressBar(total=self.steps, completed=self.step, width=space)
        row = Table.grid(padding=(0, 1, 0, 0))
        at = words.index(count)
        for _ in range(len(words) + 1):
            row.add_column(no_wrap=True)
        row.add_row(*words[:at], bar, *words[at:])
        return row

    def _figures(self, width: int) -> list[Text]:
        reading = self.reading
        if reading is None:
            return [Text("the first step is running", style="dim")]
        loss = Text.assemble("loss ", (show_loss(reading.loss), "bold"), " ", (str(self._loss_line), "green"))
        parts = [loss, Text(self.pace.speed_text), Text(f"step {show_seconds(self.pace.step_seconds, digits=3)}")]
        if reading.timeline is not None:
            parts.append(Text(f"bubble {show_share(reading.timeline.bubble)}"))
        if self.validation is not None:
            parts.append(Text(f"validation {show_loss(self.validation)}"))
        if reading.lr:
            parts.append(Text(f"lr {reading.lr[0]:.3g}", style="dim"))
        return _packed(parts, width)

    def _memory(self, width: int) -> list[Text]:
        held = () if self.reading is None else self.reading.lane_bytes
        if not held:
            return []
        each = [Text(f"lane {lane} {show_bytes(size, digits=3)}") for lane, size in enumerate(held)]
        lines = _packed([Text(f"memory {self.memory}"), *each], width)
        if len(lines) <= 2:
            return lines
        fullest = max(range(len(held)), key=held.__getitem__)
        low, high = (show_bytes(size, digits=3) for size in (min(held), max(held)))
        return _packed(
            [Text(f"memory {self.memory}"), Text(f"{low} to {high} per lane"), Text(f"most on lane {fullest}")], width
        )

    def _lanes(self, width: int, space: int) -> list[Text]:
        """Return the lanes of the last recorded step, as far as there is space."""
        timeline = None if self.reading is None else self.reading.timeline
        if timeline is None:
            return []
        head, num_lanes = Text(f"lanes in step {self._recorded_at}", style="dim"), timeline.num_lanes
        lines = self._drawn(timeline, width)
        if len(lines) + 1 <= space:
            return [head, *lines]
        num_shown = min(space - 2, num_lanes)  # besides the head and the line with the number of further lanes
        if num_shown < min(_LEAST_LANES, num_lanes):
            return []
        more = [Text(f"({num_lanes - num_shown} more lanes)", style="dim")] if num_shown < num_lanes else []
        return [head, *lines[:num_shown], *more]

    def _drawn(self, timeline: Timeline, width: int) -> list[Text]:
        """Draw a timeline; the result is cached for later pictures."""
        if self._strip is None or self._strip[0] is not timeline or self._strip[1] != width:
            drawn = draw_text(timeline, width=width - 1, color=True).removesuffix(summary(timeline))
            # omit the note that the terminal is too narrow
            lines = [Text.from_ansi(line) for line in drawn.splitlines() if not line.startswith("(too narrow")]
            self._strip = (timeline, width, [_cut(line, width) for line in lines])
        return self._strip[2]


def _width_of(words: Iterable[Text]) -> int:
    return sum(len(word) + 1 for word in words)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width - 1)
    line.no_wrap = True
    return line


def _packed(parts: Iterable[Text], width: int) -> list[Text]:
    """Put parts side by side, in as few lines as possible."""
    lines: list[list[Text]] = []
    space = 0
    for part in parts:
        if lines and len(part) + len(_GAP) <= space:
            lines[-1].append(part)
            space -= len(part) + len(_GAP)
        else:
            lines.append([part])
            space = width - 1 - len(part)
    return [_cut(Text(_GAP).join(line), width) for line in lines]
