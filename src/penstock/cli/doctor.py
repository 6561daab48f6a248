"""penstock doctor: run a training script for some steps, and find where it makes the host or the GPU wait."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock.errors import UsageError

if TYPE_CHECKING:
    from penstock.doctor import Report, Watch

_STEPS, _WARM = 20, 2
_RAISED, _STOPPED = 1, 130  # exit codes; 130 is that of shells for Ctrl-C


class _EnoughError(BaseException):
    """Ends the script after all steps; not an Exception, since a script may catch those."""


def doctor(
    script: Annotated[Path, typer.Argument(help="A training script.", metavar="SCRIPT")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script. Options of doctor come before SCRIPT.", metavar="ARGS"),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(help=f"Stop the script after this many optimizer steps; the first {_WARM} are ignored.", min=3),
    ] = _STEPS,
    check: Annotated[
        bool, typer.Option("--check", help="For CI: exit with 1 if there are findings or no step was run.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings as JSON; the output of the script goes to stderr.")
    ] = False,
) -> None:
    """Run a training script for some steps and find stray synchronisations: their lines, counts and costs.

    It also finds copies from memory that is not pinned, reductions along the wrong
    dimension, steps that are limited by launches, and data loaders that are too slow.

    [bold]Examples[/bold]

      penstock doctor train.py

      penstock doctor --steps 50 --json train.py --batch-size 64
    """
    _check_script(script)
    from penstock.doctor import Watch

    watching = Watch(steps, warm=_WARM, at_end=_enough)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        error = _run(script, arguments or [], watching)
    if error is not None:
        sys.stdout.flush()
        typer.echo(_describe(error, script), err=True)
    _show(watching.report, error, as_json=as_json)
    if isinstance(error, KeyboardInterrupt):
        raise typer.Exit(_STOPPED)
    if error is not None or (check and (watching.report.findings or not watching.report.num_steps)):
        raise typer.Exit(_RAISED)


def _check_script(script: Path) -> None:
    if not script.exists():
        raise UsageError(f"{script}: no such file; pass the training script, such as train.py")
    if not script.is_file():
        raise UsageError(f"{script}: is a folder; pass the training script, such as {script / 'train.py'}")
    try:
        script.open("rb").close()
    except OSError as error:
        raise UsageError(f"{script}: cannot be read: {error.strerror}") from error


def _enough() -> None:
    raise _EnoughError


def _run(script: Path, arguments: list[str], watching: Watch) -> BaseException | None:
    """Run and watch a script, as `python script` would run it; return the error that ended it, if any."""
    try:
        with _as_main(script, arguments), watching:
            runpy.run_path(str(script), run_name="__main__")
    except _EnoughError:
        return None
    except SystemExit as end:
        return end if end.code else None
    except (Exception, KeyboardInterrupt) as error:
        return error
    return None


@contextlib.contextmanager
def _as_main(script: Path, arguments: list[str]) -> Iterator[None]:
    """Set sys.argv and sys.path as for a script that runs as __main__."""
    words, folders = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = words, folders


def _describe(error: BaseException, script: Path) -> str:
    """Return the traceback of an error, from the script on, without the frames of the doctor."""
    if isinstance(error, KeyboardInterrupt):
        return "Stopped by Ctrl-C."
    if isinstance(error, SystemExit):
        return f"{script} exited with {error.code}"
    trace = traceback.TracebackException.from_exception(error)
    first = next((k for k, frame in enumerate(trace.stack) if frame.filename == str(script)), len(trace.stack))
    own = str(Path(__file__).parent.parent / "doctor")
    trace.stack[:] = [frame for frame in trace.stack[first:] if not frame.filename.startswith(own)]
    return "".join(trace.format()).rstrip()


def _show(report: Report, error: BaseException | None, *, as_json: bool) -> None:
    if as_json:
        failure = None if error is None else f"{type(error).__name__}: {error}"
        typer.echo(json.dumps({**report.to_dict(), "error": failure}, indent=2))
        return
    console = Console()
    width = console.width if console.is_terminal else None
    typer.echo("\n" + report.to_text(width=width, color=console.is_terminal and not console.no_color))
