"""The exceptions Penstock raises on purpose.

PenstockError                    everything below; catch this to catch them all
├── UsageError (ValueError)      an argument or option that cannot be right
├── ScheduleError (ValueError)   a schedule that cannot be built, read or run
│   └── VerifyError              a schedule with faults; carries all of them
├── CostError (ValueError)       costs that are not finite, not positive or not as many as stages
├── GraphError (ValueError)      a graph or cuts that contradict themselves
├── CaptureError                 a model that no path can take; says where, and what to do
├── CheckpointError              a checkpoint that is damaged, incomplete or of another model; says what is wrong where
├── PartitionError (ValueError)  no cuts fit; says what is missing where, and what would fit
├── LaneError (RuntimeError)     an action failed; names lane, stage, micro-batch, action and the line in the model
│   ├── HangError                a lane waited too long; says for what, from whom, and what that lane was doing
│   └── LostError                a process of the pipeline is gone
├── NonFiniteError (ArithmeticError)  a loss or gradient that is not finite; says where it began
├── OutputError (OSError)        a file that cannot be written
└── SolverError                  the exact solver is missing, or gave no answer in its time
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

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
    """Base of every error that Penstock raises on purpose."""


class UsageError(PenstockError, ValueError):
    """An argument or option that cannot be right."""


class ScheduleError(PenstockError, ValueError):
    """A schedule that cannot be built, read or run."""


class VerifyError(ScheduleError):
    """A schedule with faults; `faults` holds all of them, in the order of the lanes."""

    def __init__(self, message: str, faults: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.faults = faults


class CostError(PenstockError, ValueError):
    """Costs that are not finite, not positive, or not as many as the schedule's stages."""


class GraphError(PenstockError, ValueError):
    """A graph that contradicts itself, or cuts that it does not have."""


class CaptureError(PenstockError):
    """A model that no path can take; the message names the line in the model and what to do."""


class CheckpointError(PenstockError):
    """A checkpoint that is damaged, incomplete or of another model; the message names the file and what is wrong."""


class PartitionError(PenstockError, ValueError):
    """No cuts fit the memory, or the user's constraints; the message says what is missing and what would fit."""


class LaneError(PenstockError, RuntimeError):
    """An action of a lane failed; the message names lane, stage, micro-batch, action and the line in the model."""

    was_told = False  # it came from another process, which has told all others
    was_refused = False  # another process did not begin the step


class HangError(LaneError):
    """A lane waited longer than it may; the message says for what, from whom, and what that lane was doing."""


class LostError(LaneError):
    """A process of the pipeline is gone: killed, crashed, or its machine cannot be reached."""


class NonFiniteError(PenstockError, ArithmeticError):
    """A loss or gradient is NaN or infinite; the message says where that began, and what the weights are now."""


class OutputError(PenstockError, OSError):
    """A file that cannot be written; nothing is left half written."""


class SolverError(PenstockError):
    """The exact solver is not installed, or found nothing in the time it was given."""


def nearest(word: str, words: Iterable[str]) -> str:
    """Return the hint " Did you mean 'x'?" for a misspelt word, or an empty string."""
    close = get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def in_short(text: str, most: int) -> str:
    """Return a text of any length as one that can be shown: its beginning and its end.

    >>> in_short("a" * 10 + "b" * 10, 4)
    'aa [... 16 characters left out ...] bb'
    """
    left_out, half = len(text) - most, most // 2
    return text if left_out <= 0 else f"{text[:half]} [... {left_out:,} characters left out ...] {text[-half:]}"


def error_in_short(error: BaseException, most: int = 1_000) -> str:
    """Return an error's type and message; a message may hold a whole tensor, so a long one is cut."""
    return f"{type(error).__name__}: {in_short(str(error), most)}"
