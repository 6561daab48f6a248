"""penstock plan: decide how a model is cut and run, and write the plan for `penstock train --plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli import options, show
from penstock.cli.options import SHOW, WHAT
from penstock.deciding.defaults import EXPLORED_LANES, SCHEDULE
from penstock.errors import UsageError
from penstock.report.units import parse_bytes
from penstock.schedule.keep_policies import POLICIES, listed


def plan(
    model: options.Model,
    lanes: options.Lanes = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            help="Micro-batches per step; by default four per lane, but at most the number of samples.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    schedule: options.ScheduleName = SCHEDULE,
    stages_per_lane: options.StagesPerLane = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples of a whole batch; by default those of the example.", rich_help_panel=WHAT),
    ] = None,
    keep: Annotated[
        str,
        typer.Option(help=f"What stages do with saved values: {listed(POLICIES)}.", rich_help_panel=WHAT),
    ] = "hold",
    capture: options.CapturePath = "auto",
    analytic: options.Analytic = "",
    bandwidth: options.Bandwidth = "",
    latency: options.Latency = "",
    memory_limit: options.MemoryLimit = "",
    cuts: options.Cuts = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the plan; to run it: penstock train --plan plan.json.", rich_help_panel=SHOW),
    ] = None,
    html: options.Html = None,
    as_json: options.AsJson = False,
) -> None:
    """Decide how a model is cut and run: cuts, schedule, micro-batches, memory and the predicted step.

    The example is a whole batch, which a step divides into micro-batches. (For penstock profile it is a micro-batch.)

    [bold]Examples[/bold]

      penstock plan gpt2 --lanes 4 --analytic h100

      penstock plan my_model.py:build --lanes 8 --schedule zb_h1 --memory-limit 16GiB --out plan.json
    """
    options.check_outputs([path for path in (out, html) if path is not None])
    limit, cluster = options.numbers("memory-limit", memory_limit, parse_bytes), options.cluster_of(bandwidth, latency)
    with options.noted(), show.progress(quiet=as_json) as progress:
        progress("load torch", 0, 1)
        import penstock
        from penstock.model.small_models.named_models import load

        progress("build the model", 0, 1)
        made, example = load(model, batch_size=batch_size)
        if example is None:
            raise UsageError(f"{model} has no example: return a model and example arguments from it")
        is_file = schedule.lower().endswith(".csv")
        keeping: Any = keep  # checked with the arguments of the pipeline
        found = penstock.plan(
            made,
            example=example,
            lanes=lanes if lanes is not None or is_file else EXPLORED_LANES,
            micro_batches=micro_batches,
            schedule=schedule,
            stages_per_lane=stages_per_lane,
            cuts=options.cuts_of(cuts),
            keep=keeping,
            memory_limit=limit,
            cluster=cluster,
            analytic=analytic.strip() or None,
            capture_path=capture,
            progress=progress,
        )
    text = found.to_json(out)
    if html is not None:
        found.explain().to_html(html)
    if as_json:
        typer.echo(json.dumps(json.loads(text), indent=2))
        return
    show.explanation(found.explain())
    for what, path in (("plan", out), ("page", html)):
        if path is not None:
            show.note(f"{what}: {path}")
