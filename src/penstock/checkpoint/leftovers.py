"""Leftovers: delete what killed saves have left in a folder, without touching a save that is running.

A save holds a shared lock on the folder; a sweep needs the exclusive lock. The kernel releases a lock when its process
ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.checkpoint.disk import Disk

_LEFT = re.compile(r"tmp-(?:old-|latest-|)(?:[0-9]{6,18}-|)[0-9a-f]{8,}")
_OLD_SECONDS = 3600.0


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
