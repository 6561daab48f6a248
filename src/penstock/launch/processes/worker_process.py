"""Worker process: one process of a training, `torchrun -m penstock.launch.worker run.toml`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO, cast

AGAIN_FLAG = "--again"  # this is a restart after lost processes
RESOLVED_FLAG = "--resolved"  # the launcher wrote the file, which has the source of each value
PARENT_FLAG = "--parent"  # the process number of the launcher; the worker ends with it
COMMAND_FLAG = "--command"  # the command of the user, for the summary


def main(words: Sequence[str]) -> int:
    """Train from a file and flags; return the exit code."""
    from penstock.errors import PenstockError
    from penstock.launch.config.config_reader import read_config, take_flags
    from penstock.launch.config.config_writer import origins_in
    from penstock.launch.processes.exit_codes import BAD_CONFIG
    from penstock.torchrun import attempt

    rest, flags, faults = take_flags(words, [AGAIN_FLAG, COMMAND_FLAG, PARENT_FLAG, RESOLVED_FLAG])
    parents = [int(word.partition("=")[2]) for word in rest if word.startswith(f"{PARENT_FLAG}=")]
    again = next((word.partition("=")[2] for word in rest if word.startswith(f"{COMMAND_FLAG}=")), None)
    paths = [word for word in rest if not word.startswith("--")]
    if parents:
        from penstock.faults.orphans import die_with_parent

        die_with_parent(parent=parents[0])
    if len(paths) != 1:
        sys.stderr.write("Error: pass one file: python -m penstock.launch.worker run.toml\n")
        return BAD_CONFIG
    try:
        given = read_config(Path(paths[0]), flags, faults)
        is_again = AGAIN_FLAG in rest or attempt() > 0
        if RESOLVED_FLAG in rest:
            given = replace(given, origins=origins_in(Path(paths[0]).read_text()))
    except PenstockError as error:
        sys.stderr.write(f"Error: {error}\n")
        return BAD_CONFIG
    from penstock.launch.processes.train_process import run_here
    from penstock.training.view.view import View

    views = [View(again=again)]
    log = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # the drawn view is not logged, so also write lines to the log
    if RESOLVED_FLAG in rest and log and sys.stdout.isatty():
        sys.stderr = cast("TextIO", Tee(sys.stderr, Path(log).with_name("stderr.log")))
        views.append(View(quiet=True, again=again, file=Path(log).with_name("stdout.log").open("w")))
    return run_here(given, callbacks=tuple(views), is_again=is_again).code


def _main(words: Sequence[str]) -> int:
    try:
        return main(words)
    except KeyboardInterrupt:  # before the configuration was read; later, run_here handles it
        from penstock.launch.processes.exit_codes import INTERRUPTED
        from penstock.launch.processes.train_process import report_not_started

        report_not_started()
        return INTERRUPTED


def enter(words: Sequence[str]) -> NoReturn:
    """Run a training process, and end with its exit code."""
    code = _main(words)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # a closed terminal, which Python would report as a failure
        os._exit(code)
    if code:  # end at once, since cleaning up may wait for processes that are gone
        os._exit(code)
    sys.exit(code)


class Tee:
    """A stream whose output also goes to a file; errors of the file, such as a full disk, are ignored."""

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._file = stream, path.open("w", errors="replace")

    def write(self, text: str) -> int:
        """Write to both."""
        with suppress(OSError):
            self._file.write(text)
            self._file.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all other methods are those of the stream
        return getattr(self._stream, name)
