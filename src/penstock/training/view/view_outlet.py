"""Outlet: where a view writes, which may be gone at any moment; a training does not end for that."""

from __future__ import annotations

import errno
import os
from typing import TextIO

__all__ = ["Outlet"]

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # a reader, a terminal, a file that is not there any more


class Outlet:
    """A text file whose writes never fail: what cannot be written is dropped.

    Args:
        file: the real one.

    Attributes:
        is_gone: whether nobody will read anything that is written from now on.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self.is_gone = file, False

    @property
    def encoding(self) -> str:
        """As the file's."""
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        try:
            return self._file.isatty()
        except (AttributeError, ValueError):
            return False

    def fileno(self) -> int:
        """As the file's."""
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write, as far as the file takes it."""
        if not self.is_gone:
            try:
                self._file.write(text)
            except UnicodeEncodeError:  # a terminal that knows no bars and dots
                self._file.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._note(error)
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        if not self.is_gone:
            try:
                self._file.flush()
            except (OSError, ValueError) as error:
                self._note(error)

    def _note(self, error: OSError | ValueError) -> None:
        """Give the file up, unless it may take more later, as one on a disk that is full may."""
        if isinstance(error, OSError) and error.errno not in _GONE:
            return
        self.is_gone = True
        try:  # what is left in its buffer would fail once more when Python ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass
