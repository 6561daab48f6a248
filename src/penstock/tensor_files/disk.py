"""Disk: the file operations of a checkpoint, in one place, so that a test can stop the process at each of them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_CHUNK_BYTES = 4 << 20  # stays in the cache between the hash and the write
_LEFT = re.compile(r"tmp-(?:old-|latest-|)(?:[0-9]{6,18}-|)[0-9a-f]{8,}")
_OLD_SECONDS = 3600.0


class Disk:
    """Durable file operations. Every change of the disk is one of these methods."""

    def make_folder(self, path: Path) -> None:
        """Create a folder, unless it exists."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, handle: int, data: memoryview) -> None:
        """Write bytes to an open file; other threads run meanwhile."""
        while data:
            data = data[os.write(handle, data) :]

    def sync(self, handle: int) -> None:
        """Wait until the written data is on the disk."""
        os.fsync(handle)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file or folder atomically."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file or a whole folder; ignore errors."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def put(self, new: Path, path: Path) -> None:
        """Move a new file or folder to its place, and only then delete the old one."""
        old = path.with_name(f"{new.name}.old")
        if path.exists() or path.is_symlink():
            path.replace(old)
        new.replace(path)
        if old.exists() or old.is_symlink():
            self.remove(old)

    def write_file(self, path: Path, parts: Iterable[bytes | memoryview]) -> int:
        """Write a new file; return its size in bytes. If it cannot be written, no partial file is left."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        num_bytes = 0
        try:
            try:
                for part in parts:
                    view = memoryview(part).cast("B")
                    self.write(handle, view)
                    num_bytes += len(view)
                self.sync(handle)
            finally:
                os.close(handle)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return num_bytes

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(handle)
        finally:
            os.close(handle)

    def replace_file(self, path: Path, content: bytes, *, mark: str) -> None:
        """Replace a small file atomically."""
        part = path.with_name(f"tmp-{path.name}-{mark}")
        part.unlink(missing_ok=True)
        self.write_file(part, [content])
        self.replace(part, path)
        self.sync_folder(path.parent)


def chunks(view: memoryview) -> Iterable[memoryview]:
    """Split a buffer into pieces."""
    for begin in range(0, len(view), _CHUNK_BYTES):
        yield view[begin : begin + _CHUNK_BYTES]


def open_plain(path: Path) -> tuple[int, int]:
    """Open a regular file, not a link or a pipe; return its handle and its size in bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise OSError(22, "not a regular file")
    return handle, found.st_size


# ---- leftovers of killed saves
#
# A save holds a shared lock on the folder; a sweep needs the exclusive lock. The kernel releases a lock when its
# process ends, however it ends.


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the shared lock of a folder, so that nobody sweeps it; wait for a running sweep."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: a sweep then deletes only old files
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        _unlock(handle)


def sweep(folder: Path, disk: Disk) -> bool:
    """Delete what killed saves have left; return False, and delete nothing, if a save is running."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # the folder does not exist yet, or the save will report the error
        return True
    is_alone = True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            is_alone = False
        with suppress(OSError):  # a leftover that cannot be deleted is harmless: its name is not a checkpoint's
            for path in sorted(folder.iterdir()):
                if _LEFT.fullmatch(path.name) and (is_alone or _is_old(path)):
                    disk.remove(path)
    finally:
        _unlock(handle)
    return True


def _is_old(path: Path) -> bool:
    """Return whether nothing in a path has changed for an hour."""
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    return all(time.time() - one.lstat().st_mtime > _OLD_SECONDS for one in (path, *inside))


def _unlock(handle: int) -> None:
    with suppress(OSError):  # closing is not enough if a child process has a copy of the handle
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
