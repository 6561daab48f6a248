"""penstock profile: capture a model, measure it, cut it into stages, and predict a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.model_options import (
    COSTS,
    SHOW,
    WHAT,
    Analytic,
    AsJson,
    Bandwidth,
    CapturePath,
    Cuts,
    Html,
    Lanes,
    Latency,
    MemoryLimit,
    MicroBatches,
    Model,
    ScheduleName,
    StagesPerLane,
    cluster_of,
    noted,
)

if TYPE_CHECKING:
    from penstock.planning.explain.explanation import Explanation


def profile(
    model: Model,
    lanes: Lanes = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = "1f1b",
    stages_per_lane: StagesPerLane = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Samples of a micro-batch; by default those of the example.", rich_help_panel=WHAT),
    ] = None,
    keep: Annotated[
        str, typer.Option(help="What stages do with saved values: hold or recompute.", rich_help_panel=WHAT)
    ] = "hold",
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--eval", help="The mode of the capture; by default that of the model.", rich_help_panel=WHAT
        ),
    ] = None,
    capture: CapturePath = "auto",
    device: Annotated[
        str, typer.Option(help="Where to measure, such as cuda; by default where the model is.", rich_help_panel=COSTS)
    ] = "",
    analytic: Analytic = "",
    save: Annotated[
        Path | None, typer.Option(help="Write the profile, to load it later.", rich_help_panel=COSTS)
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Use a saved profile instead of measuring.", rich_help_panel=COSTS)
    ] = None,
    bandwidth: Bandwidth = "",
    latency: Latency = "",
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(
            help="Bytes of optimizer state per byte of a parameter; 2 by default, as for Adam.",
            rich_help_panel=COSTS,
        ),
    ] = None,
    memory_limit: MemoryLimit = "",
    cuts: Cuts = "",
    html: Html = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a page with the timeline of the predicted step.", rich_help_panel=SHOW)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Profile a model and cut it into stages: their costs, the values that cross the cuts, and the predicted step.

    [bold]Examples[/bold]

      penstock profile gpt2 --lanes 4

      penstock profile my_model.py:build --analytic h100 --lanes 8 --schedule zb_h1 --memory-limit 16GiB --html m.html
    """
    from penstock.cli import show
    from penstock.cli.options import check_outputs, numbers
    from penstock.report.units import parse_bytes
    from penstock.schedules import load_csv

    _check_costs({"--load": load, "--analytic": analytic.strip(), "--device": device.strip()})
    check_outputs([path for path in (save, html, timeline) if path is not None])
    limit, cluster = numbers("memory-limit", memory_limit, parse_bytes), cluster_of(bandwidth, latency)
    chosen = load_csv(schedule) if schedule.lower().endswith(".csv") else schedule
    with noted(), show.progress(quiet=as_json) as progress:
        from penstock import explain

        found = explain(
            model,
            lanes=lanes,
            micro_batches=micro_batches,
            schedule=chosen,
            stages_per_lane=stages_per_lane,
            cuts=[int(word) if word.isdecimal() else word for word in map(str.strip, cuts.split(",")) if word],
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
    written = _write(found, save=save, html=html, timeline=timeline)
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "written": written}, indent=2))
        return
    show.explanation(found)
    for what, path in written.items():
        show.note(f"{what}: {path}")


def _check_costs(given: dict[str, object]) -> None:
    from penstock.errors import UsageError

    if len(names := [name for name, value in given.items() if value]) > 1:
        raise UsageError(f"{' and '.join(names)}: each of them defines the times; pass only one")


def _device(name: str) -> str | None:
    """Return the device to measure on; refuse one that does not work."""
    from penstock.errors import UsageError

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


def _write(found: Explanation, *, save: Path | None, html: Path | None, timeline: Path | None) -> dict[str, str]:
    """Write the requested files; return their paths."""
    writers: dict[str, tuple[Path | None, Callable[[Path], None]]] = {
        "profile": (save, found.profile.save),
        "page": (html, found.to_html),
        "timeline": (timeline, found.timeline.to_html),
    }
    written = {}
    for what, (path, write) in writers.items():
        if path is not None:
            write(path)
            written[what] = str(path)
    return written
