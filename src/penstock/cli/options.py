"""Options: those of commands that take a model, and how options of all commands are read and checked."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import CostError, UsageError
from penstock.files import check_writable
from penstock.planning.cluster import Cluster, Link
from penstock.report.units import parse_bytes, parse_seconds

Writers = Mapping[str, tuple[Path | None, Callable[[Path], object]]]  # the files to write, and how

WHAT, COSTS, CUTS, SHOW = "Model and schedule", "Costs", "Cuts", "Output"

Model = Annotated[
    str,
    typer.Argument(
        help="package.module:callable or file.py:callable, which returns a model, or a model and an example; or a"
        " model type of transformers, such as gpt2, for a small random model; or hf:FOLDER, a folder of "
        "save_pretrained, whose weights are not read.",
        metavar="MODEL",
    ),
]
Lanes = Annotated[int | None, typer.Option(help="Number of lanes; 4 by default.", rich_help_panel=WHAT)]
MicroBatches = Annotated[int | None, typer.Option(help="Micro-batches per step; 8 by default.", rich_help_panel=WHAT)]
ScheduleName = Annotated[
    str, typer.Option(help="A schedule by name (see penstock simulate --list), or a CSV file.", rich_help_panel=WHAT)
]
StagesPerLane = Annotated[
    int | None, typer.Option(help="Stages per lane, if the schedule leaves it open.", rich_help_panel=WHAT)
]
CapturePath = Annotated[
    str, typer.Option(help="The capture path: auto, direct, export or replay.", rich_help_panel=WHAT)
]
Analytic = Annotated[
    str,
    typer.Option(
        help="Count operations and bytes for a device, such as h100 or cpu, instead of measuring.",
        rich_help_panel=COSTS,
    ),
]
Bandwidth = Annotated[
    str,
    typer.Option(
        help="Bytes per second between lanes, such as 25GB; by default transfers take no time.", rich_help_panel=COSTS
    ),
]
Latency = Annotated[
    str, typer.Option(help="Seconds until another lane sees a value, such as 20us.", rich_help_panel=COSTS)
]
MemoryLimit = Annotated[
    str,
    typer.Option(help="Memory of each lane, such as 16GiB; or one value per lane, with commas.", rich_help_panel=CUTS),
]
Cuts = Annotated[
    str,
    typer.Option(
        help="Where cuts must lie: the modules or nodes after the cuts, or node numbers, with commas; the others are"
        " chosen.",
        rich_help_panel=CUTS,
    ),
]
Html = Annotated[
    Path | None, typer.Option(help="Write a page: the model as a strip of nodes with its cuts.", rich_help_panel=SHOW)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=SHOW)]


def cluster_of(bandwidth: str, latency: str) -> Cluster | None:
    """Return a cluster whose links have this bandwidth and latency; None if neither is given."""
    given = {
        "bytes_per_second": numbers("bandwidth", bandwidth.removesuffix("/s"), parse_bytes),
        "latency_seconds": numbers("latency", latency, parse_seconds),
    }
    known = {name: value for name, value in given.items() if value is not None}
    if any(isinstance(value, list) for value in known.values()):
        raise UsageError(
            "--bandwidth and --latency: pass one number for all links; in Python, a Cluster can have one per link"
        )
    return Cluster(link=Link(**known)) if known else None


@contextmanager
def noted() -> Iterator[None]:
    """Print each warning of Penstock once as a note, and suppress those of other packages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = str(Path(__file__).parent.parent)
    for message in dict.fromkeys(str(warning.message) for warning in caught if warning.filename.startswith(own)):
        typer.echo(f"Note: {message}", err=True)


def check_outputs(paths: list[Path]) -> None:
    """Check all output files in advance, so that no file is written if one cannot be."""
    for path in paths:
        check_writable(path)
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("two outputs have the same path")


def write_files(writers: Writers) -> dict[str, str]:
    """Write the requested files; return their paths."""
    for path, write in writers.values():
        if path is not None:
            write(path)
    return {what: str(path) for what, (path, _) in writers.items() if path is not None}


def numbers(option: str, text: str, parse: Callable[[str], float]) -> Any:  # noqa: ANN401 - one number or several
    """Read one number, or several with commas; None for an empty text."""
    if not text.strip():
        return None
    try:
        found = [parse(word) for word in text.split(",")]
    except ValueError:
        raise CostError(f"--{option}: {text!r} is not a number or a list of numbers with commas") from None
    return found[0] if len(found) == 1 else found


def cuts_of(text: str) -> list[int | str]:
    """Read the places of cuts: numbers or names of nodes, with commas."""
    return [int(word) if word.isdecimal() else word for word in map(str.strip, text.split(",")) if word]
