"""Run folder: the folder of a training's results, and its lock against a second training."""

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
from typing import Any

from penstock.errors import OutputError, UsageError, warn_user
from penstock.torchrun import attempt

_LOCK = "lock"
_PATIENCE_SECONDS = (1.0, 10.0)  # for a first start, and for a restart
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_HELD_LOCKS: set[int] = set()


def _close_locks() -> None:
    """Close the locks in a forked child, such as a data worker: they belong to the parent and must end with it."""
    for lock in _HELD_LOCKS:
        with suppress(OSError):
            os.close(lock)
    _HELD_LOCKS.clear()


os.register_at_fork(after_in_child=_close_locks)


class RunFolder:
    """A folder that belongs to one training at a time.

    The first process holds a file lock. The operating system releases it when the process ends, for any reason, so a
    leftover lock file blocks nobody. If the file system has no locks, or lost them in a network failure, the last
    training to take the folder owns it: its mark is in the lock file, and the previous training finds it there.

    Args:
        path: the folder; created if it does not exist.
        is_first: whether this is the first process; other processes write nothing.
    """

    def __init__(self, path: str | Path, *, is_first: bool) -> None:
        self.path, self.is_first = Path(path).absolute(), is_first  # the user's code may change the working directory
        self._lock: int | None = None
        self._mark = b""

    def take(self) -> None:
        """Create and lock the folder.

        Raises:
            OutputError: if it cannot be created or written.
            UsageError: if another training has it.
        """
        if not self.is_first:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be used as a run folder: {error.strerror}") from error
        # a killed training that is being restarted may not be gone yet
        end = time.monotonic() + _PATIENCE_SECONDS[attempt() > 0]
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _TAKEN:
                    warn_user(
                        f"{self.path}: its file system has no locks ({error.strerror}): a second training would not be "
                        "detected"
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
        _HELD_LOCKS.add(lock)

    def why_lost(self) -> str:
        """Return a reason if another training has taken the folder since, otherwise ""."""
        if self._lock is None:
            return ""
        try:
            found = (self.path / _LOCK).read_bytes()
        except OSError:  # deleted or unreachable: that does not mean that another training has it
            return ""
        if found == self._mark:
            return ""
        other = found.decode(errors="replace").strip() or "unknown"
        return f"{self.path}: another training has taken over this folder ({other:.200})"

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            _HELD_LOCKS.discard(self._lock)
            if not self.why_lost():  # otherwise the text belongs to another training
                os.ftruncate(self._lock, 0)
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def write(self, name: str, text: str) -> Path:
        """Write a file atomically."""
        path = self.path / name
        if self.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.tmp")
            beside.write_text(text)
            beside.replace(path)
        return path

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line of JSON with a single write, so that lines of several processes do not mix."""
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

    def __exit__(self, *_: object) -> None:
        self.release()
