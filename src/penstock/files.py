"""Files: write a file so that it is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from os import PathLike
from pathlib import Path

from penstock.errors import OutputError

__all__ = ["write_whole"]


def write_whole(path: str | PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place, then move it there.

    Raises:
        OutputError: when it cannot be written; nothing is left behind.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    part: Path | None = None
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            part = Path(file.name)
            file.write(data)
        part.chmod(0o666 & ~_umask())
        part.replace(target)
    except OSError as error:
        if part is not None:
            part.unlink(missing_ok=True)
        raise OutputError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
