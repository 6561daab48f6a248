"""Leftovers: what saves that were killed have left in a folder, and how a save that is alive is told from them.

Who saves holds a shared lock on the folder meanwhile; who sweeps needs it alone. The lock is the kernel's: it ends with
its process, however that ends.
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

__all__ = ["held", "sweep"]

_LEFT = re.compile(r"tmp-(?:old-|latest-|)(?:[0-9]{6,18}-|)[0-9a-f]{8,}")
_OLD_SECONDS = 3600.0


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Let nobody sweep a folder meanwhile; a sweep that is under way is waited for."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: then only what is old is swept
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        _let_go(handle)


def sweep(folder: Path, disk: Disk) -> bool:
    """Delete what killed saves have left; return False where a save is under way, and nothing was touched."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # there is nothing yet, or the save will say why it cannot be opened
        return True
    is_alone = True
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            is_alone = False
        with suppress(OSError):  # what cannot be deleted is not taken for a checkpoint either
            for path in sorted(folder.iterdir()):
                if _LEFT.fullmatch(path.name) and (is_alone or _is_old(path)):
                    disk.remove(path)
    finally:
        _let_go(handle)
    return True


def _is_old(path: Path) -> bool:
    """Say whether nothing in it has changed for long."""
    inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
    return all(time.time() - one.lstat().st_mtime > _OLD_SECONDS for one in (path, *inside))


def _let_go(handle: int) -> None:
    with suppress(OSError):  # closing alone would not do it, where a child has a copy of the handle
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)
