"""Process logs: write the output of each process to files in the layout of torchrun, and show the important lines."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from pathlib import Path
from typing import Literal, TextIO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

Show = Literal["drawn", "lines", "nothing"]  # of the first process: a view in a terminal, lines, or nothing
_SECONDS = 0.05
_HOLD_SECONDS = 1.0


class Tail:
    """Follows a file and shows its new lines.

    Args:
        path: the file; it may not exist yet.
        prefix: prefix of each shown line; None for the first process.
        to: the stream that shows the lines; None: the process has shown them itself.
        shown: the lines already shown, with the prefix of their process; other processes do not repeat them.
        hold_seconds: delay of errors, since the first process may be about to report the same error.
    """

    def __init__(
        self, path: Path, to: TextIO | None, *, prefix: str | None, shown: dict[str, str | None],
        hold_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        self._path, self._to, self._prefix, self._shown = path, to, prefix, shown
        self._offset, self._rest = 0, ""
        self._hold_seconds, self._held_since, self._held = hold_seconds, 0.0, list[str]()

    def follow(self, *, is_last: bool = False) -> None:
        """Show the new lines."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        if is_last and self._rest:
            lines.append(self._rest)
            self._rest = ""
        self._show(self._released(lines, is_last=is_last))

    def _released(self, lines: list[str], *, is_last: bool) -> list[str]:
        """Return the lines to show now; hold back the lines from an error on, so that others can report it first."""
        if not self._hold_seconds:
            return lines
        now, lines = time.monotonic(), [*self._held, *lines]
        if not self._held:
            self._held_since = now
        is_over = is_last or now - self._held_since > self._hold_seconds
        errors = [] if is_over else [number for number, line in enumerate(lines) if line.startswith("Error: ")]
        at = errors[0] if errors else len(lines)
        self._held = lines[at:]
        return lines[:at]

    def _show(self, lines: list[str]) -> None:
        for line in lines:
            if not line.strip():
                text = "\n" if self._prefix is None else ""
            elif self._shown.setdefault(line, self._prefix) == self._prefix:
                text = f"{self._prefix or ''}{line}\n"
            else:
                continue
            if self._to is not None:
                self._to.write(text)
        if lines and self._to is not None:
            self._to.flush()


class Follower:
    """A thread that shows new lines in the files of processes."""

    def __init__(self) -> None:
        self._tails: list[Tail] = []
        self._shown: dict[str, str | None] = {}
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-logs", daemon=True)

    def add(self, path: Path, to: TextIO | None, *, prefix: str | None, hold_seconds: float = 0.0) -> None:
        """Follow one more file."""
        with self._lock:
            self._tails.append(Tail(path, to, prefix=prefix, shown=self._shown, hold_seconds=hold_seconds))

    def forget(self) -> None:
        """Show the rest of all files, and stop following them, since their processes have ended."""
        with self._lock:
            self._follow(is_last=True)
            self._tails.clear()
            self._shown.clear()

    def _follow(self, *, is_last: bool = False) -> None:
        for tail in self._tails:
            try:
                tail.follow(is_last=is_last)
            except (OSError, ValueError):  # a closed output must not end the training
                continue

    def _run(self) -> None:
        while not self._is_over.wait(_SECONDS):
            with self._lock:
                self._follow()

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.forget()


class RunLogs(LogsSpecs):
    """The files of each attempt and process, such as `attempt_0/0/stdout.log`. Files of earlier runs are kept.

    In a terminal, the first process draws its own view; otherwise its output is followed. Of the other processes, only
    stderr is shown.
    """

    def __init__(self, folder: Path, follower: Follower, *, show: Show = "drawn") -> None:
        super().__init__(str(folder))
        self._folder, self._follower, self._show = folder, follower, show
        self._is_terminal = show == "drawn" and sys.stdout.isatty()
        taken = [re.fullmatch(r"attempt_(\d+)", path.name) for path in folder.glob("attempt_*")]
        self._number = max((int(found[1]) + 1 for found in taken if found), default=0)

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the processes of one attempt."""
        self._follower.forget()
        attempt = self._folder / f"attempt_{self._number}"
        self._number += 1
        found = LogsDest(filtered_stdout=str(attempt / "filtered.log"), filtered_stderr=str(attempt / "filtered.log"))
        for local, env in envs.items():
            folder = attempt / env["RANK"]
            folder.mkdir(parents=True, exist_ok=True)
            found.error_files[local] = env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            is_first = env["RANK"] == "0"
            draws = is_first and self._is_terminal
            found.stdouts[local] = "" if draws else str(folder / "stdout.log")
            found.stderrs[local] = "" if draws else str(folder / "stderr.log")
            if draws:
                self._follower.add(folder / "stderr.log", None, prefix=None)
                continue
            if is_first and self._show != "nothing":
                self._follower.add(folder / "stdout.log", sys.stdout, prefix=None)
            prefix = None if is_first else f"[lane {env['RANK']}] "
            hold = 0.0 if is_first or not self._is_terminal else _HOLD_SECONDS
            self._follower.add(folder / "stderr.log", sys.stderr, prefix=prefix, hold_seconds=hold)
        return found


def quiet_torch(path: Path) -> None:
    """Send the log messages of torch's agent to a file."""
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("torch.distributed.elastic")
    logger.handlers = [handler]
    logger.propagate = False
