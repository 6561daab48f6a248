"""penstock demo: the main job in one go: simulate schedules, compare them, draw them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo"]

_SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "auto")


def demo(
    folder: Annotated[Path, typer.Option(help="Where to put the page and the trace.")] = Path("penstock-demo"),
    lanes: Annotated[int, typer.Option(help="Lanes.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches a step.")] = 8,
) -> None:
    """Simulate and compare schedules, draw their timelines, and say where the page is."""
    from penstock.cli import show
    from penstock.cli.job import Job
    from penstock.errors import OutputError
    from penstock.report.html import write_html

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}") from error
    show.note(f"{lanes} lanes, {micro_batches} micro-batches; F 10 ms, I 10 ms, W 8 ms, transfer 0.5 ms, saved 512 MiB")
    job = Job(
        schedules=_SCHEDULES,
        lanes=lanes,
        micro_batches=micro_batches,
        seconds={"forward": "10ms", "input_grad": "10ms", "weight_grad": "8ms"},
        transfer="0.5ms",
        held={"saved_bytes": "512MiB", "pending_bytes": "200MiB"},
    )
    results = show.run_with_progress(job, quiet=False)
    show.table(results)
    show.charts(results[:1] + results[3:])
    write_html([result.timeline for result in results], folder / "timelines.html")
    results[-1].timeline.to_chrome(folder / "auto.json")
    show.note(f"\nOpen {folder / 'timelines.html'} in a browser, and {folder / 'auto.json'} in Perfetto.")
