"""penstock simulate: build, simulate, compare and draw schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.cli.simulate_job import Result

_WHAT, _COSTS, _SHOW = "Schedule", "Costs", "Output"


def simulate(
    schedule: Annotated[
        str, typer.Option(help="A schedule by name (see --list), or a CSV file.", rich_help_panel=_WHAT)
    ] = "1f1b",
    lanes: Annotated[int | None, typer.Option(help="Number of lanes; 4 by default.", rich_help_panel=_WHAT)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches per step; 8 by default.", rich_help_panel=_WHAT)
    ] = None,
    stages_per_lane: Annotated[
        int | None, typer.Option(help="Stages per lane, if the schedule leaves it open.", rich_help_panel=_WHAT)
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Further schedules to compare with, separated by commas.", rich_help_panel=_WHAT)
    ] = "",
    two_ways: Annotated[
        bool, typer.Option(help="Allow auto to keep the weights of each stage on two lanes.", rich_help_panel=_WHAT)
    ] = False,
    keep: Annotated[
        str, typer.Option(help="What stages do with saved values: hold, recompute or offload.", rich_help_panel=_WHAT)
    ] = "hold",
    forward: Annotated[
        str,
        typer.Option(
            help="Seconds of the forward of a lane for one micro-batch, such as 18.5ms, shared evenly by its stages; or"
            " one number per stage, with commas.",
            rich_help_panel=_COSTS,
        ),
    ] = "1",
    backward: Annotated[
        str,
        typer.Option(
            help="The same for the full backward; by default the sum of its two parts.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    input_grad: Annotated[
        str,
        typer.Option(
            help="The same for the input gradient; by default equal to the forward.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    weight_grad: Annotated[
        str,
        typer.Option(
            help="The same for the weight gradient; by default equal to the input gradient.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    transfer: Annotated[
        str, typer.Option(help="Seconds until another lane sees a value.", rich_help_panel=_COSTS)
    ] = "0",
    saved_bytes: Annotated[
        str,
        typer.Option(
            help="Bytes that a lane saves for one micro-batch, such as 512MiB; or one number per stage.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    pending_bytes: Annotated[
        str,
        typer.Option(
            help="The part of --saved-bytes that the weight gradient needs; by default all.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    memory_limit: Annotated[
        str,
        typer.Option(
            help="Memory limit of each lane, such as 16GiB; or one per lane. Needs --saved-bytes.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write a page with timelines to zoom and compare.", rich_help_panel=_SHOW)
    ] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", rich_help_panel=_SHOW)] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the schedule as a CSV file of torch.distributed.pipelining.", rich_help_panel=_SHOW),
    ] = None,
    chart: Annotated[bool, typer.Option(help="Draw the lanes.", rich_help_panel=_SHOW)] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=_SHOW)] = False,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="List all schedules, each with a summary and its paper.", rich_help_panel=_SHOW),
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
        show.note("torch does not support stages on two lanes or updates within a step, so it will refuse this CSV")


def _write(results: list[Result], *, html: Path | None, chrome: Path | None, csv: Path | None) -> dict[str, str]:
    """Write the requested files; return their paths."""
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
