"""Commands: run the command line in the process of the test, which saves the import of torch."""

from __future__ import annotations

from typing import NamedTuple

from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import CheckpointError, PenstockError


class Done(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


def penstock(*words):
    """Run `penstock ...`; turn an error of Penstock into the message and the exit code that `run()` makes of it."""
    result = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(result.exception, PenstockError):
        return Done(65 if isinstance(result.exception, CheckpointError) else 2, "", f"Error: {result.exception}")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Done(result.exit_code, result.stdout, result.stderr)
