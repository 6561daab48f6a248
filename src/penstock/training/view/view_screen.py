"""Screen: shows a training while it goes: one picture drawn anew in its place, or plain lines where that cannot be."""

from __future__ import annotations

import atexit
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.training.view.view_lines import step_line
from penstock.training.view.view_outlet import Outlet
from penstock.training.view.view_picture import Picture

if TYPE_CHECKING:
    from penstock.training.callbacks.progress import Reading

__all__ = ["Screen"]

_PAUSE_SECONDS = 0.15  # between two pictures: the eye asks for no more, and each takes time from the lanes


class Screen:
    """Where a training is shown; a context manager, for a terminal must get its cursor back.

    A picture is shown in a terminal. Elsewhere, where NO_COLOR is set, and when it is to be quiet there is a line for
    each log.

    Args:
        steps: how many there will be.
        step: how many are done already.
        memory: what the bytes of lanes are: held, resident, or peak allocated.
        quiet: plain lines also in a terminal.
        file: where to write; by default standard output.
    """

    def __init__(
        self, steps: int, *, step: int = 0, memory: str = "held", quiet: bool = False, file: TextIO | None = None
    ) -> None:
        outlet = Outlet(sys.stdout if file is None else file)
        self._console = Console(file=outlet, highlight=False)  # type: ignore[arg-type]  # all that rich asks of a file
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
            except BaseException:  # Ctrl-C in the middle of the first picture
                self.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, reading: Reading) -> None:
        """Take a step in; draw, if it is time to."""
        self.picture.add(reading)
        if time.monotonic() - self._drawn_at > _PAUSE_SECONDS:
            self._draw()

    def log(self) -> None:
        """Show the step that was taken in last, whether or not it is time to."""
        if self._live is None and self.picture.reading is not None:
            self.line(step_line(self.picture.reading, self.picture.pace, self.picture.memory))
        self._draw()

    def line(self, text: str, *, style: str = "") -> None:
        """Say something that stays, above the picture."""
        # a line that a program may read is not broken; in a terminal words are
        self._console.print(Text(text, style=style), soft_wrap=self._live is None)
        self._console.file.flush()

    def close(self) -> None:
        """Leave the last picture as it is, and the terminal as it was; more lines may follow."""
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
