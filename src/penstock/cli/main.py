"""Main: the `penstock` command and its subcommands. Invalid input ends with one message and exit code 2."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from penstock._version import __version__
from penstock.cli.checkpoint import checkpoint
from penstock.cli.demo import demo
from penstock.cli.doctor import doctor
from penstock.cli.plan import plan
from penstock.cli.profile import profile
from penstock.cli.simulate import simulate
from penstock.cli.train import TrainCommand, train
from penstock.errors import CheckpointError, PenstockError

_BAD_DATA = 65  # a retry does not help

app = typer.Typer(
    name="penstock",
    help="Pipeline parallelism for PyTorch that keeps every device full.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=TrainCommand)(train)
app.command()(simulate)
app.command()(plan)
app.command()(profile)
app.command()(demo)
app.add_typer(checkpoint)
# all arguments after the name of the script belong to the script
app.command(context_settings={"allow_interspersed_args": False})(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Pipeline parallelism for PyTorch that keeps every device full."""


def run() -> None:
    """Run the command line; errors of Penstock become one message and exit code 2 or 65."""
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except PenstockError as error:
        typer.secho(f"Error: {error}", err=True)
        sys.exit(_BAD_DATA if isinstance(error, CheckpointError) else 2)
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        _drop_output()
        sys.exit(0)
    except OSError as error:  # such as a full disk
        _drop_output()
        typer.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
        sys.exit(2)


def _drop_output() -> None:
    """Keep Python from flushing stdout at exit, which would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
