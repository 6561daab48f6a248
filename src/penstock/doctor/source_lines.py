"""Source lines: the line of user code that is running."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_INSIDE = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parent.parent))
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True)
class Place:
    """A line of code; if it is in a library, `caller` is the line of user code that led to it."""

    file: str
    line: int
    caller: Place | None = None

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line}"

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()


NOWHERE = Place("", 0)


def find_place(thread: int | None = None) -> Place:
    """Return the innermost line outside torch and Penstock in this thread, or else in another thread.

    Torch's backward threads and the lanes' threads have no line of the user; the thread that waits for them has.
    """
    found = _find(sys._getframe(1))
    if found is None and thread is not None:
        found = _find(sys._current_frames().get(thread))
    return found or NOWHERE


def _find(frame: FrameType | None) -> Place | None:
    lines = _lines(frame)
    first = next(lines, None)
    if first is None:
        return None
    file, line = first
    if not _is_library(file):
        return Place(file, line)
    own = next((Place(f, n) for f, n in lines if not _is_library(f)), None)
    return Place(file, line, own)


def _lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    """Yield the lines of a stack from the innermost, without those of torch, Penstock and Python."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not _is_inside(file):
            yield file, frame.f_lineno
        frame = frame.f_back


@cache
def _is_inside(file: str) -> bool:
    if file.startswith(("<frozen", "<eval_with_key", "<__")):
        return True
    return file.startswith(_INSIDE) or (file.startswith(_STANDARD) and not _is_library(file))


@cache
def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _shown(file: str) -> str:
    """Return a path relative to the current folder if possible."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file
