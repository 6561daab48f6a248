"""Live: a training as it goes, a table and its lanes in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from penstock.report.format import printable, show_share
from penstock.report.text import draw_text, summary

if TYPE_CHECKING:
    from penstock.cli.training import Reading, Settings

__all__ = ["show_training"]

_MOST_ROWS = 11
_PAUSE_SECONDS = 0.15  # between two pictures: the eye asks for no more, and each takes time from the lanes


def show_training(readings: Iterable[Reading], settings: Settings) -> list[Reading]:
    """Show a training while it goes; return what was read."""
    console = Console()
    found = []
    if not console.is_terminal:
        for reading in readings:
            found.append(reading)
            if _is_row(reading.step, settings.steps):
                typer.echo(_line(reading, settings.steps))
        return found
    with Live(console=console, auto_refresh=False) as live:
        picture = _Picture(console, live, settings)
        for reading in readings:
            found.append(reading)
            picture.show(reading)
    return found


def _is_row(step: int, num_steps: int) -> bool:
    """Is this one of the steps that get a row: the first, the last, and some at even distances?"""
    every = -(-num_steps // (_MOST_ROWS - 1))
    return step in (1, num_steps) or step % every == 0


def _line(reading: Reading, num_steps: int) -> str:
    return (
        f"step {reading.step:>{len(str(num_steps))}} of {num_steps}: loss {reading.loss:.3f}, "
        f"{reading.tokens_per_second:,.0f} tokens/s, bubble {show_share(reading.timeline.bubble)}"
    )


class _Picture:
    """The rows so far, the row of now, the lanes of the step measured last, and a bar: drawn anew in its place."""

    def __init__(self, console: Console, live: Live, settings: Settings) -> None:
        self._console, self._live, self._settings = console, live, settings
        self._rows: list[Reading] = []
        self._drawn_at = 0.0
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn())
        left = (TextColumn("to go"), TimeRemainingColumn())
        self._bar = Progress(*columns, *left, console=console, auto_refresh=False)
        self._task = self._bar.add_task("", total=settings.steps)

    def show(self, reading: Reading) -> None:
        """Draw, if it is time to."""
        self._bar.update(self._task, completed=reading.step)
        is_row = _is_row(reading.step, self._settings.steps)
        rows = [*self._rows, reading]
        if is_row:
            self._rows = rows
        now = time.monotonic()
        if is_row or now - self._drawn_at > _PAUSE_SECONDS:
            self._drawn_at = now
            self._live.update(self._draw(rows), refresh=True)

    def _draw(self, rows: list[Reading]) -> RenderableType:
        table = self._table(rows)
        if rows[-1].step == self._settings.steps:
            return table  # is what stays on the screen
        lanes = self._lanes(rows[-1])
        has_room = _MOST_ROWS + 4 + len(lanes) + 2 <= self._console.height
        return Group(table, *(lanes if has_room else []), self._bar)

    def _table(self, rows: list[Reading]) -> Table:
        table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in ("step", "loss", "tokens/s", "bubble"):
            table.add_column(heading, justify="right", no_wrap=True, min_width=8)
        table.add_column("schedule", style="cyan", no_wrap=True)
        name = Text(printable(self._settings.schedule))
        for row in rows:
            speed, bubble = f"{row.tokens_per_second:,.0f}", show_share(row.timeline.bubble)
            table.add_row(str(row.step), f"{row.loss:.3f}", speed, bubble, name)
        return table

    def _lanes(self, reading: Reading) -> list[Text]:
        color = not self._console.no_color
        drawn = draw_text(reading.timeline, width=self._console.width - 1, color=color)
        lanes = drawn.removesuffix(summary(reading.timeline)).splitlines()
        return [*(Text.from_ansi(line) for line in lanes), Text()]
