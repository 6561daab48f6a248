"""Pages: the recorded timelines of a training, beside its logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.report.timeline import Timeline

from penstock.errors import warn_user

__all__ = ["Pages"]


class Pages:
    """Writes timelines into a run folder.

    Args:
        folder: of the run.
        predicted: returns the step that was predicted, to stand beside the measured one; None where nothing was.

    Attributes:
        paths: of those that were written.
    """

    def __init__(self, folder: Path, predicted: Callable[[], Timeline | None]) -> None:
        self._folder, self._predicted = folder / "timelines", predicted
        self.paths: list[Path] = []

    def write(self, step: int, timeline: Timeline) -> Path | None:
        """Write the page of a step; None, with a warning, where that does not work: a full disk ends no training."""
        page = self._folder / f"step-{step:06d}.html"
        try:
            self._folder.mkdir(exist_ok=True)
            timeline.to_html(page, compare=self._predicted())
        except OSError as error:
            warn_user(f"the timeline of step {step} was not written: {error}; training goes on")
            return None
        self.paths.append(page)
        return page
