"""penstock demo: train a small GPT in a pipeline, and show what its lanes did."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli import show
from penstock.cli.demo_training import BATCH_SIZE, LANES, LENGTH, MICRO_BATCHES, PROMPT, Settings
from penstock.cli.options import check_outputs
from penstock.cli.simulate import Job
from penstock.errors import OutputError, UsageError
from penstock.report.terminal_chart import draw_text
from penstock.report.timeline import Timeline
from penstock.report.units import printable, show_count, show_seconds, show_share

if TYPE_CHECKING:
    from penstock.cli.demo_training import Comparison, Training
    from penstock.training.callbacks.callback import Reading

_STEPS, _SCHEDULE = 300, "1f1b"  # half a minute on two cores
_COMPARED, _COMPARED_LANES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "auto"), 4  # with --simulate
_MOST_LINES = 11  # of a training, if stdout is not a terminal
_STOPPED = 130  # the exit code of shells for Ctrl-C


def demo(
    steps: Annotated[int | None, typer.Option(help=f"Number of steps; {_STEPS} by default.", min=1)] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help=f"A schedule by name (see penstock simulate --list), or a CSV file; {_SCHEDULE} by default."),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option(help=f"Number of lanes; {LANES} by default, {_COMPARED_LANES} with --simulate.", min=1)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help=f"Micro-batches per step; {MICRO_BATCHES} by default.", min=1)
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate and compare several schedules instead of training.")
    ] = False,
    folder: Annotated[Path, typer.Option(help="Folder for the page and the trace.")] = Path("penstock-demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a small GPT in a pipeline, let it write text, and draw its lanes next to the prediction.

    This takes about half a minute on two cores. The model is plain torch code
    without any knowledge of pipelines. The training text is part of Penstock.

    [bold]Examples[/bold]

      penstock demo

      penstock demo --schedule zb_h1 --steps 100

      penstock demo --simulate --lanes 8
    """
    given = [name for name, value in {"--steps": steps, "--schedule": schedule}.items() if value is not None]
    if simulate and given:
        raise UsageError(f"{' and '.join(given)}: not allowed with --simulate, which trains nothing")
    settings = Settings(steps or _STEPS, schedule or _SCHEDULE, lanes=lanes, micro_batches=micro_batches)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created: {error.strerror}") from error
    if simulate:
        _compare(folder, lanes or _COMPARED_LANES, micro_batches or MICRO_BATCHES, as_json=as_json)
    else:
        _train(folder, settings, as_json=as_json)


# ---- training


def _train(folder: Path, settings: Settings, *, as_json: bool) -> None:
    from penstock.cli.demo_training import compare_with_plain, open_training

    page, trace = folder / "timelines.html", folder / "measured.json"
    check_outputs([page, trace])
    try:
        with ExitStack() as stack:
            with show.progress(quiet=as_json) as progress:
                progress("load torch", 0, 1)
                training = stack.enter_context(open_training(settings, progress=progress))
            if not as_json:
                _introduce(training)
            readings = list(training.run()) if as_json else _watch(training.run(), settings.steps)
            text = training.write()
            compared = compare_with_plain(training)
    except KeyboardInterrupt:
        typer.echo("Stopped by Ctrl-C; nothing was written.", err=True)
        raise typer.Exit(_STOPPED) from None
    training.timeline.to_html(page, compare=training.explanation.timeline)
    training.timeline.to_chrome(trace)
    if as_json:
        written = {"page": str(page), "trace": str(trace)}
        typer.echo(json.dumps({**_figures(training, readings, text, compared), "written": written}, indent=2))
        return
    _conclude(training, text, compared)
    show.note(f"\nThe measured and the predicted step, for any browser: {page}")
    show.note(f"The measured step, for Perfetto: {trace}")


def _introduce(training: Training) -> None:
    """Print the model and its stages."""
    found, schedule = training.explanation, training.pipe.schedule
    size = show_count(found.num_parameters, digits=3)
    show.note(f"A GPT with {size} parameters learns to write, on {schedule.num_lanes} lanes")
    name = printable(schedule.name)
    typer.echo(f"schedule {name}, {schedule.num_mbs} micro-batches, {BATCH_SIZE} × {LENGTH} characters per step")
    for stage in found.stages:
        lanes = " and ".join(map(str, stage.lanes))
        typer.echo(f"stage {stage.index} on lane {lanes} ({show_share(stage.share)}): {stage.modules_text}")


def _watch(readings: Iterable[Reading], num_steps: int) -> list[Reading]:
    """Show a training while it runs, in the view of all trainings; return its readings."""
    from penstock.training.view.view_screen import Screen

    found, every = [], -(-num_steps // (_MOST_LINES - 1))
    with Screen(num_steps) as screen:
        for reading in readings:
            found.append(reading)
            screen.add(reading)
            if reading.step in (1, num_steps) or reading.step % every == 0:
                screen.log()
    return found


def _conclude(training: Training, text: str, compared: Comparison) -> None:
    """Show the text of the model, the measured and predicted step, and the time of the plain model."""
    console = Console()
    show.note("\nThe model writes")
    console.print(Text.assemble((PROMPT, "dim"), text))
    show.note("\nA measured step")
    color = console.is_terminal and not console.no_color
    typer.echo(draw_text(training.timeline, width=console.width, color=color))
    predicted = training.explanation.timeline
    typer.echo(f"predicted: step {show_seconds(predicted.step_seconds)}, bubble {show_share(predicted.bubble)}")
    console.print(Text(str(compared)), soft_wrap=not console.is_terminal)  # breaks lines at words only in a terminal


def _figures(training: Training, readings: list[Reading], text: str, compared: Comparison) -> dict[str, Any]:
    from penstock.training.view.view_figures import Pace

    schedule = training.pipe.schedule
    return {
        "schedule": schedule.name,
        "lanes": schedule.num_lanes,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_mbs,
        "cuts": list(training.pipe.cuts),
        "losses": [reading.loss for reading in readings],
        "tokens_per_second": Pace(readings).tokens_per_second,
        "measured": _step_figures(training.timeline),
        "predicted": _step_figures(training.explanation.timeline),
        "compared": {"plain_seconds": compared.plain_seconds, "pipeline_seconds": compared.pipeline_seconds},
        "text": text,
    }


def _step_figures(timeline: Timeline) -> dict[str, Any]:
    return {
        "step_seconds": timeline.step_seconds,
        "bubble_over_makespan": timeline.bubble,
        "bubble_over_longest_lane_span": timeline.span_bubble,
    }


# ---- comparing


def _compare(folder: Path, lanes: int, micro_batches: int, *, as_json: bool) -> None:
    """Simulate and compare schedules, and draw their timelines."""
    from penstock.report.timeline_page import write_html

    job = Job(
        schedules=_COMPARED,
        lanes=lanes,
        micro_batches=micro_batches,
        seconds={"forward": "10ms", "input_grad": "10ms", "weight_grad": "8ms"},
        transfer="0.5ms",
        held={"saved_bytes": "512MiB", "pending_bytes": "200MiB"},
    )
    if not as_json:
        costs = "F 10 ms, I 10 ms, W 8 ms, transfer 0.5 ms, saved 512 MiB"
        show.note(f"{lanes} lanes, {micro_batches} micro-batches; {costs}")
    results = show.run_with_progress(job, quiet=as_json)
    page, trace = folder / "timelines.html", folder / "auto.json"
    write_html([result.timeline for result in results], page)
    results[-1].timeline.to_chrome(trace)
    if as_json:
        written = {"page": str(page), "trace": str(trace)}
        typer.echo(json.dumps({"schedules": [result.figures() for result in results], "written": written}, indent=2))
        return
    show.table(results)
    show.charts(results[:1] + results[3:])
    show.note(f"\nOpen {page} in a browser, and {trace} in Perfetto.")
