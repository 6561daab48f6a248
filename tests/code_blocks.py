"""Code of pages: run it in a fresh process of the warm forkserver, where torch is loaded already."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from processes import _CONTEXT

_SECONDS = 120


def run_block(block: str, folder: Path) -> tuple[int | None, str]:
    """Run some Python as a script, in a folder; return the exit code and what it printed."""
    printed = folder / "printed.txt"
    process = _CONTEXT.Process(target=_enter, args=(block, str(folder), str(printed)))
    process.start()
    process.join(_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, printed.read_text()


def _enter(block: str, folder: str, printed: str) -> None:
    with open(printed, "w") as out:  # noqa: PTH123 - its descriptor takes the place of stdout and stderr
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(folder)
    try:
        exec(compile(block, "<page>", "exec"), {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
        sys.exit(1)
