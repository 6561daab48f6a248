"""Options of the commands that take a model: `penstock profile` and `penstock plan`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from penstock.planning.cluster import Cluster

WHAT, COSTS, CUTS, SHOW = "How to run it", "What it costs", "Where to cut", "What to show"

Model = Annotated[
    str,
    typer.Argument(
        help="package.module:callable or file.py:callable, which returns a model, or a model and an example; or a"
        " model type of transformers, as gpt2: a small random one.",
        metavar="MODEL",
    ),
]
Lanes = Annotated[int | None, typer.Option(help="Lanes; 4 if nothing is said.", rich_help_panel=WHAT)]
MicroBatches = Annotated[
    int | None, typer.Option(help="Micro-batches a step; 8 if nothing is said.", rich_help_panel=WHAT)
]
ScheduleName = Annotated[
    str,
    typer.Option(help="A schedule's name (penstock simulate --list), or a CSV file.", rich_help_panel=WHAT),
]
StagesPerLane = Annotated[
    int | None, typer.Option(help="Stages a lane, where the schedule leaves it open.", rich_help_panel=WHAT)
]
CapturePath = Annotated[
    str,
    typer.Option(help="The way to capture it: auto, direct, export or replay.", rich_help_panel=WHAT),
]
Analytic = Annotated[
    str,
    typer.Option(
        help="Measure nothing: count operations and bytes for a device, as h100 or cpu.", rich_help_panel=COSTS
    ),
]
Bandwidth = Annotated[
    str,
    typer.Option(
        help="Bytes a second between lanes, as 25GB; by default transfers take no time.", rich_help_panel=COSTS
    ),
]
Latency = Annotated[str, typer.Option(help="Seconds until another lane sees a value, as 20us.", rich_help_panel=COSTS)]
MemoryLimit = Annotated[
    str, typer.Option(help="Bytes a lane has, as 16GiB; or one a lane, with commas.", rich_help_panel=CUTS)
]
Cuts = Annotated[
    str,
    typer.Option(
        help="Where cuts must lie: modules or nodes that they lie before, or numbers of nodes, with commas; the"
        " others are chosen.",
        rich_help_panel=CUTS,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(help="Write a page: the model as a strip of nodes, with the cuts on it.", rich_help_panel=SHOW),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=SHOW)]


def cluster_of(bandwidth: str, latency: str) -> Cluster | None:
    """Return the cluster whose links have a bandwidth and a latency; None where nothing is said of them."""
    from penstock.cli.options import numbers
    from penstock.errors import UsageError
    from penstock.planning.cluster import Cluster, Link
    from penstock.report.units import parse_bytes, parse_seconds

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


@contextmanager
def noted() -> Iterator[None]:
    """Print warnings of ours as notes, each once, and keep those of other packages back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = str(Path(__file__).parent.parent)
    for message in dict.fromkeys(str(warning.message) for warning in caught if warning.filename.startswith(own)):
        typer.echo(f"Note: {message}", err=True)
