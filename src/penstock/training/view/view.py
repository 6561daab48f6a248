"""View: a callback that shows a training: a live picture in a terminal, plain lines elsewhere, and a final summary."""

# ruff: noqa: ARG002
# (callbacks ignore some arguments)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from penstock.faults.straggler import SlowLaneWarning
from penstock.training.callbacks.callback import Callback, Reading, Summary
from penstock.training.view.view_figures import Totals
from penstock.training.view.view_lines import (
    begin_line,
    evaluate_line,
    fault_line,
    memory_kind,
    save_line,
    summary_lines,
)
from penstock.training.view.view_screen import Screen

if TYPE_CHECKING:
    from penstock.training.trainer import Trainer


class View(Callback):
    """Shows a training; only the first process does.

    In a terminal, it redraws one picture in place: a bar with the remaining time, the loss, samples or tokens per
    second, the step time, the measured bubble, the memory of each lane, and the work of the lanes in the last recorded
    step. Validations, checkpoints and faults are lines above it. Elsewhere, with NO_COLOR, and with `quiet`, it prints
    one line per log. If the terminal goes away, the training continues.

    Args:
        quiet: print plain lines even in a terminal.
        again: the command that continues the training, for the summary of a training that ended early.
        file: the output file; by default standard output.
    """

    def __init__(self, *, quiet: bool = False, again: str | None = None, file: TextIO | None = None) -> None:
        self._quiet, self._again, self._file = quiet, again, file
        self._screen: Screen | None = None
        self._slow_lane_warning = SlowLaneWarning()
        self._totals = Totals()

    def on_train_begin(self, trainer: Trainer) -> None:
        """Describe the training, and open the picture."""
        if not trainer.is_first:
            return
        self.close()
        self._totals = Totals()
        memory = memory_kind(trainer)
        screen = Screen(trainer.options.steps, step=trainer.step, memory=memory, quiet=self._quiet, file=self._file)
        screen.line(begin_line(trainer), style="bold")
        self._screen = screen.__enter__()

    def on_step_end(self, trainer: Trainer, reading: Reading) -> None:
        """Draw if enough time has passed."""
        if self._screen is None:
            return
        self._totals.add(reading)
        self._screen.add(reading)

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Draw, or print a line."""
        if self._screen is not None:
            self._screen.log()

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Show the result of a validation."""
        if self._screen is not None:
            self._screen.picture.validation = figures["validation_loss"]
            self._screen.line(evaluate_line(figures))

    def on_record(self, trainer: Trainer, page: Path) -> None:
        """Report a slow lane once."""
        timeline = None if trainer.reading is None else trainer.reading.timeline
        if self._screen is not None and timeline is not None:
            for words in self._slow_lane_warning.check(timeline):
                self._screen.line(f"step {trainer.step}: {words}", style="yellow")

    def on_save(self, trainer: Trainer, step: int, folder: Path) -> None:
        """Show the folder of the checkpoint."""
        if self._screen is not None:
            self._screen.line(save_line(step, folder))

    def on_fault(self, trainer: Trainer, fault: Mapping[str, Any]) -> None:
        """Show a fault; if it ends the training, restore the terminal first."""
        if self._screen is None:
            return
        if fault.get("kind") == "error" or fault.get("policy") == "stop":
            self._screen.close()
        self._screen.line(fault_line(fault), style="bold red")

    def on_recover(self, trainer: Trainer, step: int) -> None:
        """Show the step from which the training continues."""
        if self._screen is not None:
            self._screen.line(f"continues from the checkpoint of step {step}", style="yellow")

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """Show the summary."""
        if self._screen is None:
            return
        screen = self._screen
        self.close()
        events = trainer.folder.path / "events.jsonl"
        lines = summary_lines(
            summary,
            first_loss=self._totals.first_loss,
            speed=self._totals.speed_text,
            events=events if events.exists() else None,
            again=self._again,
        )
        screen.line(lines[0], style="bold green" if summary.is_done else "bold yellow")
        for line in lines[1:]:
            screen.line(line)

    def close(self) -> None:
        """Restore the terminal, also after an error."""
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
