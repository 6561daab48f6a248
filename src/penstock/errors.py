"""Errors: the exceptions that Penstock raises on purpose.

PenstockError                    the base class: catch it to catch all of them
├── UsageError (ValueError)      an invalid argument or option
├── ScheduleError (ValueError)   a schedule that cannot be built, read or run
│   └── VerifyError              a schedule with faults; has a list of all of them
├── CostError (ValueError)       costs that are not finite, not positive or not one per stage
├── GraphError (ValueError)      an inconsistent graph, or invalid cuts
├── CaptureError                 a model that no capture path supports; says where it failed and what to do
├── CheckpointError              a checkpoint that is damaged, incomplete or of another model; names the file
├── PartitionError (ValueError)  no cuts fit; says how much memory is missing and what would fit
├── LaneError (RuntimeError)     an action failed; names lane, stage, micro-batch, action and the line in the model
│   ├── HangError                a lane waited too long; names the value, its sender and the sender's current action
│   └── LostError                a process of the pipeline is gone
├── NonFiniteError (ArithmeticError)  a loss or gradient that is not finite; says where it began
├── OutputError (OSError)        a file that cannot be written
└── SolverError                  the exact solver is missing, or found no answer within its time limit
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = [
    "CaptureError",
    "CheckpointError",
    "CostError",
    "GraphError",
    "HangError",
    "LaneError",
    "LostError",
    "NonFiniteError",
    "OutputError",
    "PartitionError",
    "PenstockError",
    "ScheduleError",
    "SolverError",
    "UsageError",
    "VerifyError",
]


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose."""


class UsageError(PenstockError, ValueError):
    """An invalid argument or option."""


class ScheduleError(PenstockError, ValueError):
    """A schedule that cannot be built, read or run."""


class VerifyError(ScheduleError):
    """A schedule with faults; `faults` has all of them, in the order of the lanes."""

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class CostError(PenstockError, ValueError):
    """Costs that are not finite, not positive, or not one per stage."""


class GraphError(PenstockError, ValueError):
    """An inconsistent graph, or cuts that the graph does not allow."""


class CaptureError(PenstockError):
    """A model that no capture path supports; the message names the line in the model and what to do."""


class CheckpointError(PenstockError):
    """A checkpoint that is damaged, incomplete or of another model; the message names the file and the fault."""


class PartitionError(PenstockError, ValueError):
    """No cuts fit the memory or the requested constraints; the message says how much is missing and what would fit."""


class LaneError(PenstockError, RuntimeError):
    """An action of a lane failed; the message names lane, stage, micro-batch, action and the line in the model."""

    was_reported = False  # another process raised it, and has reported it to all other processes
    was_not_started = False  # another process refused to start the step


class HangError(LaneError):
    """A lane waited too long; the message names the value, its sender and the sender's current action."""


class LostError(LaneError):
    """A process of the pipeline is gone: killed, crashed, or its machine cannot be reached."""


class NonFiniteError(PenstockError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the message says where this began and what state the weights are in."""


class OutputError(PenstockError, OSError):
    """A file that cannot be written; no partial file is left."""


class SolverError(PenstockError):
    """The exact solver is not installed, or found nothing within its time limit."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the hint " Did you mean 'x'?" for a misspelled word, or an empty string."""
    close = get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def in_short(text: str, most: int) -> str:
    """Shorten a long text to its beginning and its end.

    >>> in_short("a" * 10 + "b" * 10, 4)
    'aa [... 16 characters left out ...] bb'
    """
    left_out, half = len(text) - most, most // 2
    return text if left_out <= 0 else f"{text[:half]} [... {left_out:,} characters left out ...] {text[-half:]}"


def error_in_short(error: BaseException, most: int = 1_000) -> str:
    """Return the type and message of an error; a long message, which may contain a whole tensor, is shortened."""
    return f"{type(error).__name__}: {in_short(str(error), most)}"


_OUR_FOLDER = str(Path(__file__).parent)
_OF_TORCH = "/site-packages/torch/"  # frames of its decorators lie between our frames and the user's


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the user's code that called Penstock."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OUR_FOLDER) or _OF_TORCH in frame.f_code.co_filename
    ):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
