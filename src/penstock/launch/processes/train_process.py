"""Running: train what a configuration says in this process, the only one or one of several."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.errors import in_short
from penstock.launch.processes.exit_codes import AGAIN, DONE, RAISED, code_of, code_of_status
from penstock.launch.processes.shutdown_deadline import grace
from penstock.torchrun import attempt

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress
    from penstock.launch.config.config_reader import Given
    from penstock.training.callbacks.callback import Callback
    from penstock.training.trainer import Trainer

__all__ = ["Ending", "run_here", "tell_unbegun"]

_MOST_TOLD = 2000  # characters of a message that are written down
_MOST_SAID = 20_000  # characters that are said at once: a message may hold a whole tensor


class _ToldError(BaseException):
    """SIGTERM came before the first step: there is nothing to save."""


class Ending:
    """How a training in this process ended: its code, and its summary where there is one."""

    def __init__(self, code: int, summary: Any = None) -> None:  # noqa: ANN401 - a Summary, which needs torch
        self.code, self.summary = code, summary


def run_here(
    given: Given,
    *,
    callbacks: tuple[Callback, ...] = (),
    progress: Progress | None = None,
    is_again: bool = False,
) -> Ending:
    """Train; whatever happens is told on stderr, written to the folder's faults.jsonl, and becomes an exit code.

    Args:
        given: the configuration.
        callbacks: to be told what happens.
        progress: is told what is done before the first step.
        is_again: processes before were lost, and this goes on for them.
    """
    shown, warnings.showwarning = warnings.showwarning, _show_warning  # type: ignore[assignment]  # takes all
    before = signal.signal(signal.SIGTERM, _leave)
    trainer: Trainer | None = None
    try:
        from penstock.launch.build.trainer_builder import build_trainer

        with grace(given.config.grace_seconds), ExitStack() as stack:
            trainer = build_trainer(given, stack, callbacks=callbacks, progress=progress, is_again=is_again)
            trainer.data_watch.on_stuck = partial(_leave_stuck, given, trainer)
            summary = trainer.fit()
        return Ending(code_of_status(summary.status), summary)
    except _ToldError:
        _say("told to end before the first step: there is nothing to save")
        return Ending(DONE)
    except BaseException as error:
        code = code_of(error)
        if isinstance(error, KeyboardInterrupt) and trainer is None:
            tell_unbegun()
            return Ending(code)
        _note(given, error, code, trainer)
        _tell(error, code)
        return Ending(code)
    finally:
        signal.signal(signal.SIGTERM, before)
        warnings.showwarning = shown


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - as handlers are called
    raise _ToldError


def _leave_stuck(given: Given, trainer: Trainer, error: BaseException) -> None:
    """End this process by an error that its main thread cannot raise: it is in code that nothing interrupts."""
    code = code_of(error)
    _note(given, error, code, trainer)
    _tell(error, code)
    os._exit(code)


def tell_unbegun() -> None:
    """Say that Ctrl-C came before there was anything to save; of several processes the first says it."""
    if os.environ.get("RANK", "0") == "0":
        _say("Stopped by Ctrl-C before the first step: there is nothing to save.")


def _say(text: str) -> None:
    with suppress(OSError):  # a terminal that was closed ends no training
        sys.stdout.flush()
        sys.stderr.write(in_short(text, _MOST_SAID).rstrip() + "\n")
        sys.stderr.flush()


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    """Tell warnings of ours in a line; others with their place."""
    own = str(Path(__file__).parent.parent.parent)
    where = "" if filename.startswith(own) else f" ({category.__name__}, {filename}:{lineno})"
    _say(f"Warning: {message}{where}")


def _tell(error: BaseException, code: int) -> None:
    """Say what ended it: once, by the process it happened in; with a traceback only where user code raised."""
    from penstock.errors import LaneError, PenstockError

    if getattr(error, "was_told", False):
        return
    if isinstance(error, KeyboardInterrupt):
        _say("Stopped by Ctrl-C, twice: what was not saved is lost.")
        return
    if isinstance(error, LaneError) and error.__cause__ is not None and code == RAISED:
        _say(_trace(error.__cause__))
    elif not isinstance(error, PenstockError) and code != AGAIN:
        _say(_trace(error))
        return
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    _say(f"Error: {error}{notes}")


def _trace(error: BaseException) -> str:
    """Return an error as Python tells it, without the frames that are ours."""
    told = traceback.TracebackException.from_exception(error)
    own = str(Path(__file__).parent.parent.parent)
    told.stack[:] = [frame for frame in told.stack if not frame.filename.startswith(own)] or told.stack
    return "".join(told.format())


def _note(given: Given, error: BaseException, code: int, trainer: Trainer | None) -> None:
    """Write down why this process ends, for whoever started it, and for the user."""
    from penstock.training.resume.run_folder import RunFolder

    folder = RunFolder(given.config.folder, is_first=False)
    if getattr(error, "was_told", False) or (trainer is None and not folder.path.is_dir()):
        return
    try:
        folder.append(
            "faults.jsonl",
            {
                "kind": "end",
                "attempt": attempt(),
                "lane": int(os.environ.get("RANK", "0")),
                "step": None if trainer is None else trainer.step + 1,
                "code": code,
                "error": type(error).__name__,
                "message": in_short(str(error), _MOST_TOLD),
            },
        )
    except OSError as problem:
        _say(f"Warning: faults.jsonl cannot be written: {problem.strerror}")
