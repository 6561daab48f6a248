"""Files: atomic writes, and a check in advance whether a file can be written."""

from __future__ import annotations

import os
import secrets
import stat
from os import PathLike
from pathlib import Path

from penstock.errors import OutputError

_NEW_FILE = 0o666  # minus the umask, as for any new file


def write_whole(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a temporary file and rename it to the target; follow links, and write directly to pipes and devices.

    Raises:
        OutputError: if the file cannot be written; no partial file is left.
    """
    part: Path | None = None
    try:
        data = content.encode() if isinstance(content, str) else content
        if _is_stream(path):
            with Path(path).open("wb") as stream:
                stream.write(data)
            return
        target = _target(path)
        beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        # a file that replaces a private file is never readable by others, not even for a moment
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(beside, flags, _NEW_FILE if mode is None else 0o600), "wb") as file:
            part = beside
            file.write(data)
        if mode is not None:
            part.chmod(mode)
        part.replace(target)
    except (OSError, ValueError, TypeError) as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise OutputError(f"{path!s}: cannot be written: {_reason(error)}") from error


def check_writable(path: str | PathLike[str]) -> None:
    """Check in advance whether a file can be written.

    Raises:
        OutputError: if its folder does not exist or is not writable, or if the path is a folder.
    """
    try:
        where = Path(path) if _is_stream(path) else _target(path).parent
        if not where.exists():
            raise FileNotFoundError(2, "No such file or directory")
        if not os.access(where, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError, TypeError) as error:
        raise OutputError(f"{path!s}: cannot be written: {_reason(error)}") from error


def _is_stream(path: str | PathLike[str]) -> bool:
    """Return whether the path is a pipe or a device, whose real path may not exist, as for /dev/stdout."""
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _target(path: str | PathLike[str]) -> Path:
    name = os.fspath(path)
    if not name:
        raise ValueError("its name is empty")
    target = Path(os.path.realpath(name))
    if target.is_dir() or name.endswith(os.sep):
        raise IsADirectoryError(21, "it is a directory")
    return target


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
