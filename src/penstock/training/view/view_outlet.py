"""View outlet: the file that a view writes to. It may disappear at any time without ending the training."""

from __future__ import annotations

import errno
import os
from typing import TextIO

_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader, the terminal or the file is gone


class Outlet:
    """A text file whose writes never fail: text that cannot be written is dropped.

    Args:
        file: the real file.

    Attributes:
        is_gone: whether the file is gone for good.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self.is_gone = file, False

    @property
    def encoding(self) -> str:
        """The encoding of the file."""
        return getattr(self._file, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        try:
            return self._file.isatty()
        except (AttributeError, ValueError):
            return False

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Write text if possible."""
        if not self.is_gone:
            try:
                self._file.write(text)
            except UnicodeEncodeError:  # the terminal cannot show bars and dots
                self._file.write(text.encode(self.encoding, "replace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._handle(error)
        return len(text)

    def flush(self) -> None:
        """Flush the file if possible."""
        if not self.is_gone:
            try:
                self._file.flush()
            except (OSError, ValueError) as error:
                self._handle(error)

    def _handle(self, error: OSError | ValueError) -> None:
        """Mark the file as gone, unless it may recover, for example from a full disk."""
        if isinstance(error, OSError) and error.errno not in _GONE:
            return
        self.is_gone = True
        try:  # otherwise its buffer would fail again when Python exits
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass
