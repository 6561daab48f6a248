"""Both: a stream of text that is written down as well: what a process says in a terminal is in its log too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Tee"]


class Tee:
    """A stream, and a file that gets all that is written to it; a disk that is full changes nothing.

    Args:
        stream: the stream; all that is not writing is its own.
        path: of the file.
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
