"""penstock profile: capture a model, measure it, cut it into stages, and predict a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock import explain
from penstock.cli import options, show
from penstock.cli.options import COSTS, SHOW, WHAT
from penstock.deciding.defaults import SCHEDULE
from penstock.errors import UsageError
from penstock.report.units import parse_bytes
from penstock.schedule.keep_policies import PLANNED, listed
from penstock.schedules import load_csv


def profile(
    model: options.Model,
    lanes: options.Lanes = None,
    micro_batches: options.MicroBatches = None,
    schedule: options.ScheduleName = SCHEDULE,
    stages_per_lane: options.StagesPerLane = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples of a micro-batch; by default those of the example.", rich_help_panel=WHAT),
    ] = None,
    keep: Annotated[
        str, typer.Option(help=f"What stages do with saved values: {listed(PLANNED)}.", rich_help_panel=WHAT)
    ] = "hold",
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--eval", help="The mode of the capture; by default that of the model.", rich_help_panel=WHAT
        ),
    ] = None,
    capture: options.CapturePath = "auto",
    device: Annotated[
        str, typer.Option(help="Where to measure, such as cuda; by default where the model is.", rich_help_panel=COSTS)
    ] = "",
    analytic: options.Analytic = "",
    save: Annotated[
        Path | None, typer.Option(help="Write the profile, to load it later.", rich_help_panel=COSTS)
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Use a saved profile instead of measuring.", rich_help_panel=COSTS)
    ] = None,
    bandwidth: options.Bandwidth = "",
    latency: options.Latency = "",
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(
            help="Bytes of optimizer state per byte of a parameter; 2 by default, as for Adam.", rich_help_panel=COSTS
        ),
    ] = None,
    memory_limit: options.MemoryLimit = "",
    cuts: options.Cuts = "",
    html: options.Html = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a page with the timeline of the predicted step.", rich_help_panel=SHOW)
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Profile a model and cut it into stages: their costs, the values that cross the cuts, and the predicted step.

    [bold]Examples[/bold]

      penstock profile gpt2 --lanes 4

      penstock profile my_model.py:build --analytic h100 --lanes 8 --schedule zb_h1 --memory-limit 16GiB --html m.html
    """
    costs = {"--load": load, "--analytic": analytic.strip(), "--device": device.strip()}
    if len(given := [name for name, value in costs.items() if value]) > 1:
        raise UsageError(f"{' and '.join(given)}: each of them defines the times; pass only one")
    options.check_outputs([path for path in (save, html, timeline) if path is not None])
    limit, cluster = options.numbers("memory-limit", memory_limit, parse_bytes), options.cluster_of(bandwidth, latency)
    chosen = load_csv(schedule) if schedule.lower().endswith(".csv") else schedule
    with options.noted(), show.progress(quiet=as_json) as progress:
        found = explain(
            model,
            lanes=lanes,
            micro_batches=micro_batches,
            schedule=chosen,
            stages_per_lane=stages_per_lane,
            cuts=options.cuts_of(cuts),
            keep=keep,
            memory_limit=limit,
            cluster=cluster,
            batch_size=batch_size,
            training=train,
            capture_path=capture,
            device=_device(device),
            profile=load,
            analytic=analytic.strip() or None,
            optimizer_bytes=optimizer_bytes,
            progress=progress,
        )
    writers: options.Writers = {
        "profile": (save, found.profile.save),
        "page": (html, found.to_html),
        "timeline": (timeline, found.timeline.to_html),
    }
    written = options.write_files(writers)
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "written": written}, indent=2))
        return
    show.explanation(found)
    for what, path in written.items():
        show.note(f"{what}: {path}")


def _device(name: str) -> str | None:
    """Return the device to measure on; refuse one that does not work."""
    word = name.strip()
    if not word:
        return None
    import torch

    try:
        torch.zeros(1, device=word).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device: nothing can be measured on {word!r}: {reason}") from error
    return word
