"""Source: the line of the user's model that an error or a node came from."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["is_called_by_torch", "line_of", "line_of_frame", "line_of_stack", "line_of_trace"]

_LIBRARY = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_OWN = str(Path(__file__).resolve().parent.parent)


def _is_inside(file: str) -> bool:
    """Return whether a file is part of torch, of Python or of Penstock: nothing a user would look at."""
    path = file.replace("\\", "/")
    if "/site-packages/" in path or "/dist-packages/" in path:
        return "-packages/torch/" in path
    return path.startswith((_LIBRARY, _OWN)) or file.startswith("<")


def _short(file: str) -> str:
    """Return a file as a reader would name it: within its package, or from where they are."""
    if "-packages/" in file:
        return file.rpartition("-packages/")[2]
    here = f"{Path.cwd()}/"
    return file.removeprefix(here)


def line_of(error: BaseException) -> str:
    """Return "at file:line" for the innermost line of the user's model on the way to an error, or nothing."""
    found = ""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        found = _last_user_line(chain.__traceback__) or found
        chain = chain.__cause__ or chain.__context__
    return f"at {found}" if found else ""


def _last_user_line(traceback: TracebackType | None) -> str:
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not _is_inside(file):
            found = f"{_short(file)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def line_of_trace(text: str) -> str:
    """Return "at file:line" for the innermost line of the user's model in a stack written as text, or nothing."""
    lines = [
        f"{_short(file)}:{line}"
        for file, line in re.findall(r'File "([^"]+)", line (\d+)', text)
        if not _is_inside(file)
    ]
    return f"at {lines[-1]}" if lines else ""


def is_called_by_torch() -> bool:
    """Return whether the function that asks was called by torch itself."""
    return "-packages/torch/" in sys._getframe(2).f_code.co_filename


def line_of_stack() -> str:
    """Return "file:line" of the innermost line of the user's model that is running now, or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if line := line_of_frame(frame):
            return line
        frame = frame.f_back
    return ""


def line_of_frame(frame: FrameType) -> str:
    """Return "file:line" where a call is in the user's model, else nothing."""
    file = frame.f_code.co_filename
    return "" if _is_inside(file) else f"{_short(file)}:{frame.f_lineno}"
