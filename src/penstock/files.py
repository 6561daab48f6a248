"""Files: write a file so that it is there whole or not at all."""

from __future__ import annotations

import os
import secrets
from os import PathLike
from pathlib import Path

from penstock.errors import OutputError

__all__ = ["check_writable", "write_whole"]


def write_whole(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place, then move it there; a link is followed, a pipe or device is written to.

    Raises:
        OutputError: when it cannot be written; nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    part: Path | None = None
    try:
        target = _target(path)
        if target.exists() and not target.is_file():
            with target.open("wb") as stream:
                stream.write(data)
            return
        beside = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}")
        # opened like any new file, so that it gets the permissions that the user's umask gives
        with beside.open("xb") as file:
            part = beside
            file.write(data)
        part.replace(target)
    except (OSError, ValueError) as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise OutputError(f"{os.fspath(path)!s}: cannot be written: {_reason(error)}") from error


def check_writable(path: str | PathLike[str]) -> None:
    """Say beforehand that a file cannot be written, where that can be seen.

    Raises:
        OutputError: when its folder is not there or may not be written to, or a folder is in its place.
    """
    try:
        target = _target(path)
        if not target.exists() and not target.parent.is_dir():
            raise FileNotFoundError(2, "No such file or directory")
        if not os.access(target if target.exists() and not target.is_file() else target.parent, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except (OSError, ValueError) as error:
        raise OutputError(f"{os.fspath(path)!s}: cannot be written: {_reason(error)}") from error


def _target(path: str | PathLike[str]) -> Path:
    if not os.fspath(path):
        raise ValueError("its name is empty")
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(21, "it is a directory")
    return target


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
