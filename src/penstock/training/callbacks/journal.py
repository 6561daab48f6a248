"""Journal: a callback that writes the events of a training as JSON lines into its folder."""

# ruff: noqa: ARG002
# (callbacks ignore some arguments)

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import warn_user
from penstock.faults.straggler import SlowLaneWarning
from penstock.torchrun import attempt
from penstock.training.callbacks.callback import Callback, Summary

if TYPE_CHECKING:
    from penstock.training.trainer import Trainer

_NAME = "events.jsonl"
_RESERVED = ("time", "event", "attempt")  # keys that an event cannot replace


class Journal(Callback):
    """Writes `events.jsonl` into the run folder; only the first process writes.

    Each line is an object with `time` (seconds since 1970), `event`, `step`, `attempt` (the number of restarts by
    torchrun), and the data of the event: `train_begin`, `log`, `evaluate`, `record`, `slow_lane`, `save`, `fault`,
    `recover`, `train_end`. Numbers that are not finite are strings that `float()` can read: "NaN", "Infinity",
    "-Infinity". A training that resumes appends to the file. If the disk is full, lines are lost, with one warning; the
    next line that can be written has their number in `lost`.
    """

    def __init__(self) -> None:
        self._lines: JsonLines | None = None
        self._slow_lane_warning = SlowLaneWarning()
        self._attempt = attempt()

    def on_train_begin(self, trainer: Trainer) -> None:
        """Write the plan of the training."""
        if not trainer.is_first:
            return
        self.close()
        self._lines = JsonLines(trainer.folder.path / _NAME)
        schedule = trainer.pipe.schedule
        self._write(
            "train_begin",
            trainer.step,
            plan={
                "schedule": schedule.name,
                "lanes": schedule.num_lanes,
                "stages": schedule.num_stages,
                "micro_batches": schedule.num_mbs,
                "cuts": list(trainer.pipe.cuts),
                "devices": [str(device) for device in trainer.pipe.devices],
            },
            steps=trainer.options.steps,
            resumed_from=trainer.step or None,
        )

    def on_log(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Write the figures of a step."""
        self._write("log", trainer.step, **figures)

    def on_evaluate(self, trainer: Trainer, figures: Mapping[str, Any]) -> None:
        """Write the result of a validation."""
        self._write("evaluate", trainer.step, **figures)

    def on_record(self, trainer: Trainer, page: Path) -> None:
        """Write the figures of a recorded step; report a slow lane once."""
        timeline = None if trainer.reading is None else trainer.reading.timeline
        if self._lines is None or timeline is None:
            return
        self._write(
            "record",
            trainer.step,
            page=_relative(trainer, page),
            makespan_seconds=timeline.step_seconds,
            bubble=timeline.bubble,
            lane_bubbles=list(timeline.lane_bubbles),
        )
        for words in self._slow_lane_warning.check(timeline):
            self._write("slow_lane", trainer.step, message=words)

    def on_save(self, trainer: Trainer, step: int, folder: Path) -> None:
        """Write that a checkpoint is complete."""
        self._write("save", step, folder=_relative(trainer, folder))

    def on_fault(self, trainer: Trainer, fault: Mapping[str, Any]) -> None:
        """Write a fault."""
        self._write("fault", trainer.step, **fault)

    def on_recover(self, trainer: Trainer, step: int) -> None:
        """Write the step from which the training continues."""
        self._write("recover", step)

    def on_train_end(self, trainer: Trainer, summary: Summary) -> None:
        """Write the summary."""
        self._write(
            "train_end",
            summary.step,
            status=summary.status,
            steps=summary.steps,
            loss=summary.loss,
            validation_loss=summary.validation,
            seconds=summary.seconds,
            resumed_from=summary.resumed_from,
            checkpoints=[_relative(trainer, folder) for folder in summary.checkpoints],
            failures=list(summary.failures),
            skipped=list(summary.skipped),
        )
        self.close()

    def close(self) -> None:
        """Close the file, also after an error."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _write(self, event: str, step: int, /, **more: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
        if self._lines is not None:
            head = {"time": round(time.time(), 3), "event": event, "step": step, "attempt": self._attempt}
            self._lines.append(head | {name: value for name, value in more.items() if name not in _RESERVED})


class JsonLines:
    """A file of JSON lines for one writing process; it never has partial lines, even if the disk is full.

    Args:
        path: the file; it may exist, and its last line may be incomplete, after a process died.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, -1
        self._num_lost, self._has_warned = 0, False

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line with a single write, without waiting for the disk. A line that cannot be written is lost."""
        more = {"lost": self._num_lost} if self._num_lost else {}
        data = (json.dumps(plain_json({**line, **more}), allow_nan=False) + "\n").encode()
        try:
            self._add(data)
            self._num_lost = 0
        except OSError as error:
            self._num_lost += 1
            if not self._has_warned:
                self._has_warned = True
                warn_user(
                    f"{self._path}: cannot be written: {error.strerror}; the training continues, and lines are lost "
                    "until it works again. This warning appears once"
                )

    def _add(self, data: bytes) -> None:
        if self._file < 0:
            self._file = _open_whole(self._path)
        end = os.fstat(self._file).st_size
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, end)  # a partial line would spoil the next one
            raise

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open_whole(path: Path) -> int:
    """Open a file for appending; remove an incomplete last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        end = size = os.fstat(file).st_size
        while end and os.pread(file, 1, end - 1) != b"\n":
            end -= 1
        if end < size:
            os.ftruncate(file, end)
    except OSError:
        os.close(file)
        raise
    return file


def plain_json(value: Any) -> Any:  # noqa: ANN401 - any value
    """Return a value as JSON can hold it; numbers that are not finite and unknown types become strings.

    >>> plain_json({"loss": float("nan"), "lr": (0.1, float("-inf")), "page": Path("a/b")})
    {'loss': 'NaN', 'lr': [0.1, '-Infinity'], 'page': 'a/b'}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Real):  # includes NumPy's numbers
        return int(value) if isinstance(value, Integral) else _plain_number(float(value))
    if isinstance(value, Mapping):
        return {str(name): plain_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_json(part) for part in value]
    return str(value)


def _plain_number(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _relative(trainer: Trainer, path: Path) -> str:
    """Return a path relative to the run folder, which may be moved."""
    try:
        return path.resolve().relative_to(trainer.folder.path.resolve()).as_posix()
    except ValueError:
        return str(path)
