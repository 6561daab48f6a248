"""View screen: shows a training while it runs: one picture that is redrawn in place, or plain lines."""

from __future__ import annotations

import atexit
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.training.view.view_lines import step_line
from penstock.training.view.view_picture import Picture

if TYPE_CHECKING:
    from penstock.training.callbacks.callback import Reading

_PAUSE_SECONDS = 0.15  # between two pictures; drawing takes time from the lanes
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)  # the reader, the terminal or the file is gone


class Outlet:
    """A text file whose writes never fail: text that cannot be written is dropped."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.is_gone = file, False  # gone for good

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


class Screen:
    """The output of a training; a context manager, because it must restore the terminal's cursor.

    In a terminal it shows a picture. Elsewhere, with NO_COLOR, and with `quiet`, it prints one line per log.

    Args:
        steps: the number of steps.
        step: the number of completed steps.
        memory: the kind of memory in `lane_bytes`: held, resident, or peak allocated.
        quiet: print plain lines even in a terminal.
        file: the output file; by default standard output.
    """

    def __init__(
        self, steps: int, *, step: int = 0, memory: str = "held", quiet: bool = False, file: TextIO | None = None
    ) -> None:
        outlet = Outlet(sys.stdout if file is None else file)
        self._console = Console(file=outlet, highlight=False)  # type: ignore[arg-type]  # has all that rich needs
        self.picture = Picture(steps, step=step, memory=memory)
        console = self._console
        self.is_live = console.is_terminal and not (console.is_dumb_terminal or console.no_color or quiet)
        self._live = Live(console=console, auto_refresh=False) if self.is_live else None
        self._drawn_at = 0.0

    def __enter__(self) -> Screen:
        if self._live is not None:
            atexit.register(self.close)
            try:
                self._live.start()
                self._draw()
            except BaseException:  # Ctrl-C during the first picture
                self.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, reading: Reading) -> None:
        """Add a step; draw if enough time has passed."""
        self.picture.add(reading)
        if time.monotonic() - self._drawn_at > _PAUSE_SECONDS:
            self._draw()

    def log(self) -> None:
        """Show the last step at once."""
        if self._live is None and self.picture.reading is not None:
            self.line(step_line(self.picture.reading, self.picture.pace, self.picture.memory))
        self._draw()

    def line(self, text: str, *, style: str = "") -> None:
        """Print a line that stays, above the picture."""
        # wrap words in a terminal only: programs may read the lines
        self._console.print(Text(text, style=style), soft_wrap=self._live is None)
        self._console.file.flush()

    def close(self) -> None:
        """Keep the last picture and restore the terminal; more lines may follow."""
        if self._live is None:
            return
        live, self._live = self._live, None
        atexit.unregister(self.close)
        if self.picture.reading is None:
            live.transient = True
        else:
            live.update(self.picture.draw(*self._console.size, is_last=True))
        live.stop()

    def _draw(self) -> None:
        if self._live is not None:
            self._drawn_at = time.monotonic()
            self._live.update(self.picture.draw(*self._console.size), refresh=True)
