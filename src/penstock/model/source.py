"""Source lines: the line of the user's model that an error or a node came from."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SOURCE = "penstock_source"  # the entry of a graph node's meta that holds its line in the user's model


def _folder(path: str | Path) -> str:
    return f"{os.path.realpath(path)}{os.sep}"


def _torch_folder() -> str:
    """Return the folder of torch without importing it, because the import takes seconds."""
    found = find_spec("torch")
    return _folder(Path(found.origin).parent) if found is not None and found.origin is not None else "no torch"


# Real paths, with links resolved. An installed Penstock lies in site-packages, like the user's libraries.
_TORCH = _torch_folder()
_INSIDE = (_folder(Path(__file__).parent.parent), _TORCH)
_PYTHON = _folder(sysconfig.get_path("stdlib"))


@cache
def _is_inside(file: str) -> bool:
    """Return whether a file is part of torch, Python or Penstock, and so not part of the user's model."""
    if file.startswith("<"):
        return True
    path = os.path.realpath(file)
    if path.startswith(_INSIDE):
        return True
    return path.startswith(_PYTHON) and {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _short(file: str) -> str:
    """Return the short path of a file: within its package, or relative to the working directory."""
    if "-packages/" in file:
        return file.rpartition("-packages/")[2]
    here = f"{Path.cwd()}/"
    return file.removeprefix(here)


def line_of(error: BaseException) -> str:
    """Return "at file:line" for the innermost line of the user's model in an error's traceback, or an empty string."""
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
        frame, line = traceback.tb_frame, traceback.tb_lineno
        file = frame.f_code.co_filename
        if not _is_inside(file):
            found = f"{_short(file)}:{line}"
        elif file.startswith("<eval_with_key>"):  # code that torch.fx generated from a trace
            found = _traced_line(frame, line) or found
        traceback = traceback.tb_next
    return found


def _traced_line(frame: FrameType, line: int) -> str:
    """Return the line of the user's model for a line of code generated from a trace, or an empty string."""
    graph = getattr(frame.f_locals.get("self"), "graph", None)
    made = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))  # each line begins with its node
    if graph is None or made is None:
        return ""
    meta: dict[str, Any] = next((node.meta for node in graph.nodes if node.name == made[1]), {})
    return str(meta.get(SOURCE) or line_of_trace(meta.get("stack_trace") or "").removeprefix("at "))


def line_of_trace(text: str) -> str:
    """Return "at file:line" for the innermost line of the user's model in a formatted stack, or an empty string."""
    lines = [
        f"{_short(file)}:{line}"
        for file, line in re.findall(r'File "([^"]+)", line (\d+)', text)
        if not _is_inside(file)
    ]
    return f"at {lines[-1]}" if lines else ""


def is_called_by_torch() -> bool:
    """Return whether torch itself called the calling function."""
    return os.path.realpath(sys._getframe(2).f_code.co_filename).startswith(_TORCH)


def line_of_stack() -> str:
    """Return "file:line" of the innermost running line of the user's model, or an empty string."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if line := line_of_frame(frame):
            return line
        frame = frame.f_back
    return ""


def line_of_frame(frame: FrameType) -> str:
    """Return "file:line" of a frame if it is in the user's model, else an empty string."""
    file = frame.f_code.co_filename
    return "" if _is_inside(file) else f"{_short(file)}:{frame.f_lineno}"
