"""penstock profile: capture a model, measure it, cut it into stages, and say what a step would take."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.planning.cluster import Cluster
    from penstock.planning.explanation import Explanation

__all__ = ["profile"]

_WHAT, _COSTS, _CUTS, _SHOW = "How to run it", "What it costs", "Where to cut", "What to show"


def profile(
    model: Annotated[
        str,
        typer.Argument(
            help="package.module:callable or file.py:callable, which returns a model, or a model and an example; or a"
            " model type of transformers, as gpt2: a small random one.",
            metavar="MODEL",
        ),
    ],
    lanes: Annotated[int | None, typer.Option(help="Lanes; 4 if nothing is said.", rich_help_panel=_WHAT)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches a step; 8 if nothing is said.", rich_help_panel=_WHAT)
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(help="A schedule's name (penstock simulate --list), or a CSV file.", rich_help_panel=_WHAT),
    ] = "1f1b",
    stages_per_lane: Annotated[
        int | None, typer.Option(help="Stages a lane, where the schedule leaves it open.", rich_help_panel=_WHAT)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples of a micro-batch; by default the example's.", rich_help_panel=_WHAT)
    ] = None,
    keep: Annotated[
        str, typer.Option(help="What stages do with saved values: hold or recompute.", rich_help_panel=_WHAT)
    ] = "hold",
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--eval", help="Capture in training or in evaluation; by default as it is.", rich_help_panel=_WHAT
        ),
    ] = None,
    capture: Annotated[
        str,
        typer.Option(help="The way to capture it: auto, direct, export or replay.", rich_help_panel=_WHAT),
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="Where to measure, as cuda; by default where the model is.", rich_help_panel=_COSTS)
    ] = "",
    analytic: Annotated[
        str,
        typer.Option(
            help="Measure nothing: count operations and bytes for a device, as h100 or cpu.", rich_help_panel=_COSTS
        ),
    ] = "",
    save: Annotated[
        Path | None, typer.Option(help="Write the profile, to load it next time.", rich_help_panel=_COSTS)
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Take a profile that was saved, measure nothing.", rich_help_panel=_COSTS)
    ] = None,
    bandwidth: Annotated[
        str,
        typer.Option(
            help="Bytes a second between lanes, as 25GB; by default transfers take no time.", rich_help_panel=_COSTS
        ),
    ] = "",
    latency: Annotated[
        str, typer.Option(help="Seconds until another lane sees a value, as 20us.", rich_help_panel=_COSTS)
    ] = "",
    optimizer_bytes: Annotated[
        float | None,
        typer.Option(
            help="Optimizer state for each byte of a parameter; 2, as for Adam, if nothing is said.",
            rich_help_panel=_COSTS,
        ),
    ] = None,
    memory_limit: Annotated[
        str, typer.Option(help="Bytes a lane has, as 16GiB; or one a lane, with commas.", rich_help_panel=_CUTS)
    ] = "",
    cuts: Annotated[
        str,
        typer.Option(
            help="Where cuts must lie: modules or nodes that they lie before, or numbers of nodes, with commas; the"
            " others are chosen.",
            rich_help_panel=_CUTS,
        ),
    ] = "",
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page: the model as a strip of nodes, with the cuts on it.", rich_help_panel=_SHOW),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write a page of the predicted step's timeline.", rich_help_panel=_SHOW)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=_SHOW)] = False,
) -> None:
    """Profile a model and cut it into stages: what each takes, what crosses the cuts, and the predicted step.

    [bold]Examples[/bold]

      penstock profile gpt2 --lanes 4

      penstock profile my_model.py:build --analytic h100 --lanes 8 --schedule zb_h1 --memory-limit 16GiB --html m.html
    """
    from penstock.cli import show
    from penstock.cli.options import check_outputs, numbers
    from penstock.report.format import parse_bytes
    from penstock.schedules import load_csv

    _check_costs({"--load": load, "--analytic": analytic.strip(), "--device": device.strip()})
    check_outputs([path for path in (save, html, timeline) if path is not None])
    limit, cluster = numbers("memory-limit", memory_limit, parse_bytes), _cluster(bandwidth, latency)
    chosen = load_csv(schedule) if schedule.lower().endswith(".csv") else schedule
    with _noted(), show.progress(quiet=as_json) as progress:
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
        raise UsageError(f"{' and '.join(names)}: times come from one of them; leave the others out")


def _cluster(bandwidth: str, latency: str) -> Cluster | None:
    from penstock.cli.options import numbers
    from penstock.errors import UsageError
    from penstock.planning.cluster import Cluster, Link
    from penstock.report.format import parse_bytes, parse_seconds

    given = {
        "bytes_per_second": numbers("bandwidth", bandwidth.removesuffix("/s"), parse_bytes),
        "latency_seconds": numbers("latency", latency, parse_seconds),
    }
    known = {name: value for name, value in given.items() if value is not None}
    if any(isinstance(value, list) for value in known.values()):
        raise UsageError(
            "--bandwidth and --latency: give one number for all links; a Cluster in Python has one for each"
        )
    return Cluster(link=Link(**known)) if known else None


def _device(name: str) -> str | None:
    """Return the device to measure on, if it is there."""
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


@contextmanager
def _noted() -> Iterator[None]:
    """Print warnings of ours as notes, each once, and keep those of other packages back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = str(Path(__file__).parent.parent)
    for message in dict.fromkeys(str(warning.message) for warning in caught if warning.filename.startswith(own)):
        typer.echo(f"Note: {message}", err=True)


def _write(found: Explanation, *, save: Path | None, html: Path | None, timeline: Path | None) -> dict[str, str]:
    """Write what was asked for, each file whole; return what is where."""
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
