"""Timeline pages: the recorded timelines of a training, in its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

from penstock.errors import warn_user


class TimelinePages:
    """Writes timelines into a run folder.

    Args:
        folder: the run folder.
        predicted: returns the predicted step to show beside the measured one, or None.

    Attributes:
        paths: the written pages.
    """

    def __init__(self, folder: Path, predicted: Callable[[], Timeline | None]) -> None:
        self._folder, self._predicted = folder / "timelines", predicted
        self.paths: list[Path] = []

    def write(self, step: int, timeline: Timeline) -> Path | None:
        """Write the page of a step; on an error, warn and return None, since a full disk must not end the training."""
        page = self._folder / f"step-{step:06d}.html"
        try:
            self._folder.mkdir(exist_ok=True)
            timeline.to_html(page, compare=self._predicted())
        except OSError as error:
            warn_user(f"the timeline of step {step} was not written: {error}; the training continues")
            return None
        self.paths.append(page)
        return page
