"""Tee: a text stream that also writes to a file, so that terminal output is also in the log."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


class Tee:
    """A stream whose output also goes to a file; errors of the file, such as a full disk, are ignored.

    Args:
        stream: the stream; all other methods are those of the stream.
        path: the file.
    """

    def __init__(self, stream: TextIO, path: Path) -> None:
        self._stream, self._file = stream, path.open("w", errors="replace")

    def write(self, text: str) -> int:
        """Write to both."""
        with suppress(OSError):
            self._file.write(text)
            self._file.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever streams have
        return getattr(self._stream, name)
