"""Show: the tables, charts and notes of the command line, drawn with rich."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from penstock.report.terminal_chart import draw_text
from penstock.report.units import printable, show_bytes, show_seconds, show_share
from penstock.schedules import describe, names

if TYPE_CHECKING:
    from penstock.cli.simulate import Job, Result
    from penstock.planning.explain.explanation import Explanation

_MOST_CHARTS = 4


def list_schedules(*, as_json: bool) -> None:
    """List all schedules, each with a summary and its paper."""
    entries = [describe(name) for name in names()]
    if as_json:
        rows = [{"name": e.name, "summary": e.summary, "paper": e.paper, "options": list(e.options)} for e in entries]
        typer.echo(json.dumps(rows, indent=2))
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("schedule", no_wrap=True, style="cyan")
    grid.add_column("what it does")
    grid.add_column("from", style="dim")
    for entry in entries:
        grid.add_row(entry.name, entry.summary, entry.paper)
    Console().print(grid)


def run_with_progress(job: Job, *, quiet: bool) -> list[Result]:
    """Run all schedules of a job; in a terminal, show the current one."""
    with _progress_bar(quiet=quiet) as progress:
        task = progress.add_task("", total=len(job.schedules))
        results = []
        for name in job.schedules:
            progress.update(task, description=f"{escape(printable(name))}: build, verify, simulate")
            results.append(job.run(name, must_fit=name == job.schedules[0]))
            progress.advance(task)
    return results


def _progress_bar(*columns: ProgressColumn, quiet: bool) -> Progress:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), *columns, TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows the current activity, the units done and their total in a terminal."""
    with _progress_bar(BarColumn(bar_width=30), TextColumn("{task.fields[count]}"), quiet=quiet) as bar:
        task = bar.add_task("", total=None, count="")

        def report(what: str, done: int, total: int) -> None:
            # with a single unit of work, the progress within it is unknown
            count, known = (f"{done} of {total}", total) if total > 1 else ("", None)
            bar.update(task, description=what, completed=done, total=known, count=count)

        yield report


def explanation(found: Explanation) -> None:
    """Print the tables of an explanation in the width of the terminal."""
    console = Console()
    width = console.width if console.is_terminal else None
    typer.echo(found.to_text(width=width, color=console.is_terminal and not console.no_color))


def table(results: list[Result]) -> None:
    """Print the figures of all schedules, compared with the first."""
    grid = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("schedule", style="cyan", overflow="fold")
    for heading in ("step", "bubble,\nmakespan", "bubble,\nlane span", "micro-\nbatches"):
        grid.add_column(heading, justify="right", no_wrap=True)
    has_bytes = any(max(result.timeline.peak_bytes) > 0 for result in results)
    if has_bytes:
        grid.add_column("bytes", justify="right", no_wrap=True)
    if len(results) > 1:
        grid.add_column("times the\nfirst's step", justify="right", no_wrap=True)
    for result in results:
        grid.add_row(*_cells(result, results[0], has_bytes=has_bytes, has_ratio=len(results) > 1))
    console = Console()
    console.print(grid)
    for line in _notes(results):
        console.print(Text(line, style="dim"))


def _notes(results: list[Result]) -> list[str]:
    lanes = {result.schedule.num_lanes for result in results}
    share = f"1/{lanes.pop()}" if len(lanes) == 1 else "1/lanes"
    lines = [
        "bubble: time without compute, as a share of the makespan and of the longest lane span;",
        "micro-batches, bytes: the peak of the fullest lane;",
        f"a micro-batch counts as 1 if {share} of the model holds its activations",
    ]
    for result in results:
        name = printable(result.schedule.name)
        if result.over_limit:
            lines.append(f"{name}: exceeds the memory limit")
        if result.schedule.is_bidirectional:
            lines.append(f"{name}: keeps the weights of each stage on two lanes")
    return lines


def charts(results: list[Result]) -> None:
    """Draw the lanes of the first few schedules."""
    console = Console()
    colored = console.is_terminal and not console.no_color
    for result in results[:_MOST_CHARTS]:
        typer.echo("")
        typer.echo(draw_text(result.timeline, width=console.width, color=colored))


def note(text: str) -> None:
    """Print a line in bold."""
    Console().print(Text(text, style="bold"), soft_wrap=True)


def _cells(result: Result, first: Result, *, has_bytes: bool, has_ratio: bool) -> list[str | Text]:
    timeline = result.timeline
    cells: list[str | Text] = [
        Text(printable(result.schedule.name)),
        show_seconds(timeline.step_seconds),
        show_share(timeline.bubble),
        show_share(timeline.span_bubble),
        f"{timeline.peak_micro_batches:.3g}",
    ]
    if has_bytes:
        cells.append(show_bytes(max(timeline.peak_bytes)))
    if has_ratio:
        base = first.timeline.step_seconds
        cells.append(f"{timeline.step_seconds / base:.3f}" if base else "–")
    return cells
