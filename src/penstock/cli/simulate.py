"""penstock simulate: build schedules, run them over time, compare and draw them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.cli.simulate_job import Result

__all__ = ["simulate"]

_WHAT, _COSTS, _SHOW = "What to simulate", "What it costs", "What to show"


def simulate(
    schedule: Annotated[str, typer.Option(help="A schedule's name, or a CSV file.", rich_help_panel=_WHAT)] = "1f1b",
    lanes: Annotated[int | None, typer.Option(help="Lanes; 4 if nothing is said.", rich_help_panel=_WHAT)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches a step; 8 if nothing is said.", rich_help_panel=_WHAT)
    ] = None,
    stages_per_lane: Annotated[
        int | None, typer.Option(help="Stages a lane, where the schedule leaves it open.", rich_help_panel=_WHAT)
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Schedules to set beside it, with commas between them.", rich_help_panel=_WHAT)
    ] = "",
    two_ways: Annotated[
        bool, typer.Option(help="Let auto keep each stage's weights on two lanes.", rich_help_panel=_WHAT)
    ] = False,
    keep: Annotated[
        str, typer.Option(help="What stages do with saved values: hold, recompute or offload.", rich_help_panel=_WHAT)
    ] = "hold",
    forward: Annotated[
        str,
        typer.Option(
            help="Seconds of a lane's forward for a micro-batch, as 18.5ms, shared evenly by its stages; or one number"
            " a stage, with commas.",
            rich_help_panel=_COSTS,
        ),
    ] = "1",
    backward: Annotated[
        str,
        typer.Option(
            help="The same for a whole backward; by default the sum of its two parts.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    input_grad: Annotated[
        str,
        typer.Option(
            help="The same for the input gradient; by default as the forward.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    weight_grad: Annotated[
        str,
        typer.Option(
            help="The same for the weight gradient; by default as the input gradient.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    transfer: Annotated[
        str, typer.Option(help="Seconds until another lane sees a value.", rich_help_panel=_COSTS)
    ] = "0",
    saved_bytes: Annotated[
        str,
        typer.Option(help="Bytes a lane saves for a micro-batch, as 512MiB; or one a stage.", rich_help_panel=_COSTS),
    ] = "",
    pending_bytes: Annotated[
        str,
        typer.Option(
            help="Of these, what the weight gradient still needs; by default all.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    memory_limit: Annotated[
        str,
        typer.Option(
            help="Bytes a lane may hold, as 16GiB; or one a lane. Needs --saved-bytes.", rich_help_panel=_COSTS
        ),
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write a page that zooms and compares.", rich_help_panel=_SHOW)
    ] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", rich_help_panel=_SHOW)] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the schedule as CSV, in torch.distributed.pipelining's form.", rich_help_panel=_SHOW),
    ] = None,
    chart: Annotated[bool, typer.Option(help="Draw the lanes.", rich_help_panel=_SHOW)] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=_SHOW)] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all schedules, each with a line and its paper.", rich_help_panel=_SHOW)
    ] = False,
) -> None:
    """Simulate a schedule: step time, bubble and memory, as a table, a chart or a page.

    [bold]Examples[/bold]

      penstock simulate --schedule zb_v --lanes 8 --micro-batches 32 --compare 1f1b,zb_h1

      penstock simulate --schedule auto --forward 1,2,1,1.5 --transfer 0.1 --html step.html
    """
    from penstock.cli import show
    from penstock.cli.options import check_outputs
    from penstock.cli.simulate_job import Job

    if list_all:
        show.list_schedules(as_json=as_json)
        return
    job = Job(
        schedules=tuple(dict.fromkeys((schedule, *(name.strip() for name in compare.split(",") if name.strip())))),
        lanes=lanes,
        micro_batches=micro_batches,
        stages_per_lane=stages_per_lane,
        two_ways=two_ways,
        keep=keep,
        seconds={"forward": forward, "backward": backward, "input_grad": input_grad, "weight_grad": weight_grad},
        transfer=transfer,
        held={"saved_bytes": saved_bytes, "pending_bytes": pending_bytes},
        memory_limit=memory_limit,
    )
    job.check()
    check_outputs([path for path in (html, chrome, csv) if path is not None])
    results = show.run_with_progress(job, quiet=as_json)
    written = _write(results, html=html, chrome=chrome, csv=csv)
    if as_json:
        typer.echo(json.dumps({"schedules": [result.figures() for result in results], "written": written}, indent=2))
        return
    show.table(results)
    if chart:
        show.charts(results)
    for what, path in written.items():
        show.note(f"{what}: {path}")
    if csv is not None and (results[0].schedule.is_bidirectional or results[0].schedule.versions is not None):
        show.note("torch has no words for stages on two lanes, or for updates within a step: it will refuse this CSV")


def _write(results: list[Result], *, html: Path | None, chrome: Path | None, csv: Path | None) -> dict[str, str]:
    """Write what was asked for, each file whole; return what is where."""
    from penstock.report.timeline_page import write_html

    written = {}
    if html is not None:
        write_html([result.timeline for result in results], html)
        written["page"] = str(html)
    if chrome is not None:
        results[0].timeline.to_chrome(chrome)
        written["trace"] = str(chrome)
    if csv is not None:
        results[0].schedule.to_csv(csv)
        written["csv"] = str(csv)
    return written
