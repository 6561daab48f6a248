"""Options: reading and checking what several commands take."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CostError, UsageError
from penstock.files import check_writable

__all__ = ["check_outputs", "numbers"]


def check_outputs(paths: list[Path]) -> None:
    """Say beforehand which files cannot be written, so that none is when one cannot."""
    for path in paths:
        check_writable(path)
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("two outputs have the same name")


def numbers(option: str, text: str, parse: Callable[[str], float]) -> Any:  # noqa: ANN401 - one number or several
    """Read one number, or several with commas; None for nothing."""
    if not text.strip():
        return None
    try:
        found = [parse(word) for word in text.split(",")]
    except ValueError:
        raise CostError(f"--{option}: {text!r} is not a number, or numbers with commas between them") from None
    return found[0] if len(found) == 1 else found
