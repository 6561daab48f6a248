"""RunFolder: where a training keeps everything, and the lock that keeps a second one out."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import OutputError, UsageError, warn_user
from penstock.torchrun import attempt

__all__ = ["RunFolder"]

_LOCK = "lock"
_PATIENCE_SECONDS = (1.0, 10.0)  # of a first start, and of a restart
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_HELD: set[int] = set()  # locks of this process


def _let_go() -> None:
    """In a child, as a data worker is: the lock is the parent's, and must go with it."""
    for lock in _HELD:
        with suppress(OSError):
            os.close(lock)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


class RunFolder:
    """A folder that belongs to one training at a time.

    The first process holds a lock of the operating system's, which goes with the process, however that ends; so a lock
    file that was left behind keeps nobody out. Where a file system has no locks, or a network that came apart let them
    go, whoever takes the folder last has it: its mark is in the lock file, and the one before finds it there.

    Args:
        path: of the folder; made if it is not there.
        is_first: whether this process speaks for all; others write nothing.
    """

    def __init__(self, path: str | Path, *, is_first: bool) -> None:
        self.path, self.is_first = Path(path).absolute(), is_first  # wherever the user's code goes meanwhile
        self._lock: int | None = None
        self._mark = b""

    def take(self) -> None:
        """Make the folder and take its lock.

        Raises:
            OutputError: when it cannot be made or written.
            UsageError: when another training has it.
        """
        if not self.is_first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be used as a run folder: {error.strerror}") from error
        # a training that was killed a moment ago, and is being restarted, may not be gone yet
        end = time.monotonic() + _PATIENCE_SECONDS[attempt() > 0]
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    warn_user(
                        f"{self.path}: its file system has no locks ({error.strerror}): nothing keeps a second "
                        "training out"
                    )
                    break
                if time.monotonic() > end:
                    holder = os.read(lock, 200).decode(errors="replace").strip()
                    os.close(lock)
                    raise UsageError(
                        f"{self.path}: another training is running in this folder ({holder or 'unknown'}); "
                        "wait for it, or choose another folder"
                    ) from None
                time.sleep(0.1)
        self._mark = f"process {os.getpid()} on {socket.gethostname()}, mark {secrets.token_hex(8)}\n".encode()
        os.ftruncate(lock, 0)
        os.pwrite(lock, self._mark, 0)
        self._lock = lock
        _HELD.add(lock)

    def why_lost(self) -> str:
        """Return who has taken the folder since this training did; nothing where it is still this one's."""
        if self._lock is None:
            return ""
        try:
            found = (self.path / _LOCK).read_bytes()
        except OSError:  # deleted, or out of reach: nobody else has it for that
            return ""
        if found == self._mark:
            return ""
        other = found.decode(errors="replace").strip() or "unknown"
        return f"{self.path}: another training has taken this folder since ({other:.200})"

    def release(self) -> None:
        """Let another training have it."""
        if self._lock is not None:
            _HELD.discard(self._lock)
            if not self.why_lost():  # else the text is of whoever has the folder now
                os.ftruncate(self._lock, 0)
            with suppress(OSError):  # there are file systems without locks
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def write(self, name: str, text: str) -> Path:
        """Write a file whole, or not at all."""
        path = self.path / name
        if self.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.tmp")
            beside.write_text(text)
            beside.replace(path)
        return path

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Add a line of JSON; one write, so that lines of several processes do not mix."""
        data = (json.dumps({"time": round(time.time(), 3), **line}) + "\n").encode()
        self.path.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, data)
        finally:
            os.close(file)

    def __enter__(self) -> RunFolder:
        self.take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
