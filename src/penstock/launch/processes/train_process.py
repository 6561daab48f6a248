"""Training process: train from a configuration in this process, alone or as one of several."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from penstock.errors import LaneError, PenstockError, in_short
from penstock.faults.orphans import end_forks_with_this_process
from penstock.launch.processes.exit_codes import AGAIN, DONE, INTERRUPTED, LATE, RAISED, code_of, code_of_status
from penstock.torchrun import attempt

if TYPE_CHECKING:
    from penstock.deciding.cut_request import Progress
    from penstock.launch.config.config_reader import LoadedConfig
    from penstock.training.callbacks.callback import Callback
    from penstock.training.trainer import Trainer

_MOST_NOTED = 2000  # characters of a message in faults.jsonl
_MOST_SAID = 20_000  # characters of a message on stderr: it may contain a whole tensor
_POLITE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OUR_FOLDER = str(Path(__file__).parent.parent.parent)


class _TerminatedError(BaseException):
    """SIGTERM arrived before the first step, so there is nothing to save."""


class Outcome:
    """How a training in this process ended: its exit code, and its summary if there is one."""

    def __init__(self, code: int, summary: Any = None) -> None:  # noqa: ANN401 - a Summary, which needs torch
        self.code, self.summary = code, summary


def run_here(
    given: LoadedConfig,
    *,
    callbacks: tuple[Callback, ...] = (),
    progress: Progress | None = None,
    is_again: bool = False,
) -> Outcome:
    """Train; report an error on stderr and in faults.jsonl of the run folder, and turn it into an exit code.

    `progress` is called with the current activity before the first step; `is_again` means that this is a restart.
    """
    shown, warnings.showwarning = warnings.showwarning, _show_warning  # type: ignore[assignment]  # takes all
    before = signal.signal(signal.SIGTERM, _leave)
    end_forks_with_this_process()
    trainer: Trainer | None = None
    try:
        from penstock.launch.build.trainer_builder import build_trainer

        with shutdown_deadline(given.config.grace_seconds), ExitStack() as stack:
            trainer = build_trainer(given, stack, callbacks=callbacks, progress=progress, is_again=is_again)
            trainer.data_watch.on_stuck = partial(_leave_stuck, given, trainer)
            summary = trainer.fit()
        return Outcome(code_of_status(summary.status), summary)
    except _TerminatedError:
        _say("SIGTERM before the first step: there is nothing to save")
        return Outcome(DONE)
    except BaseException as error:
        code = code_of(error)
        if isinstance(error, KeyboardInterrupt) and trainer is None:
            report_not_started()
            return Outcome(code)
        _note(given, error, code, trainer)
        _report(error, code)
        return Outcome(code)
    finally:
        signal.signal(signal.SIGTERM, before)
        warnings.showwarning = shown


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of handlers
    raise _TerminatedError


def _leave_stuck(given: LoadedConfig, trainer: Trainer, error: BaseException) -> None:
    """End this process with an error that its main thread cannot raise, because it is stuck in blocking code."""
    code = code_of(error)
    _note(given, error, code, trainer)
    _report(error, code)
    os._exit(code)


def report_not_started() -> None:
    """Report Ctrl-C before the first step; only the first process does."""
    if os.environ.get("RANK", "0") == "0":
        _say("Stopped by Ctrl-C before the first step: there is nothing to save.")


def _say(text: str) -> None:
    with suppress(OSError):  # a closed terminal must not end the training
        sys.stdout.flush()
        sys.stderr.write(in_short(text, _MOST_SAID).rstrip() + "\n")
        sys.stderr.flush()


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    """Show a warning of Penstock in one line; add its place to any other warning."""
    where = "" if filename.startswith(_OUR_FOLDER) else f" ({category.__name__}, {filename}:{lineno})"
    _say(f"Warning: {message}{where}")


def _report(error: BaseException, code: int) -> None:
    """Report the error, only in the process where it happened; with a traceback only if user code raised."""
    if getattr(error, "was_reported", False):
        return
    if isinstance(error, KeyboardInterrupt):
        _say("Stopped by a second Ctrl-C: progress since the last checkpoint is lost.")
        return
    if isinstance(error, LaneError) and error.__cause__ is not None and code == RAISED:
        _say(_trace(error.__cause__))
    elif not isinstance(error, PenstockError) and code != AGAIN:
        _say(_trace(error))
        return
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    _say(f"Error: {error}{notes}")


def _trace(error: BaseException) -> str:
    """Return the traceback of an error without the frames of Penstock."""
    trace = traceback.TracebackException.from_exception(error)
    trace.stack[:] = [frame for frame in trace.stack if not frame.filename.startswith(_OUR_FOLDER)] or trace.stack
    return "".join(trace.format())


def _note(given: LoadedConfig, error: BaseException, code: int, trainer: Trainer | None) -> None:
    """Write to faults.jsonl why this process ends, for the launcher and the user."""
    from penstock.training.resume.run_folder import RunFolder

    folder = RunFolder(given.config.folder, is_first=False)
    if getattr(error, "was_reported", False) or (trainer is None and not folder.path.is_dir()):
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
                "message": in_short(str(error), _MOST_NOTED),
            },
        )
    except OSError as problem:
        _say(f"Warning: faults.jsonl cannot be written: {problem.strerror}")


@contextmanager
def shutdown_deadline(seconds: float) -> Iterator[None]:
    """If a signal to end arrives inside the block, end this process the given time later; main thread only.

    The interpreter may be in a long computation, or wait for a value that never comes; then it does not run Python
    signal handlers. Therefore the C-level handler wakes a thread, which measures the time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    is_over = threading.Event()
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_count, args=(ours, is_over, seconds), name="penstock-grace", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        is_over.set()
        theirs.shutdown(socket.SHUT_RDWR)  # a forked data worker may still have it open
        theirs.close()
        thread.join()
        ours.close()


def _count(wakeup: socket.socket, is_over: threading.Event, seconds: float) -> None:
    number = 0
    while number not in _POLITE:
        byte = wakeup.recv(1)
        if not byte:
            return
        number = byte[0]
    if not is_over.wait(seconds):
        name = signal.Signals(number).name
        sys.stderr.write(
            f"Error: {name}: not saved within {seconds:g} s, so the process ends. Earlier checkpoints are kept.\n"
        )
        sys.stderr.flush()
        os._exit(INTERRUPTED if number == signal.SIGINT else LATE)
