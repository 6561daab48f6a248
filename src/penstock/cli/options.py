"""Options: read and check options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import CostError, UsageError
from penstock.files import check_writable


def check_outputs(paths: list[Path]) -> None:
    """Check all output files in advance, so that no file is written if one cannot be."""
    for path in paths:
        check_writable(path)
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise UsageError("two outputs have the same path")


def numbers(option: str, text: str, parse: Callable[[str], float]) -> Any:  # noqa: ANN401 - one number or several
    """Read one number, or several with commas; None for an empty text."""
    if not text.strip():
        return None
    try:
        found = [parse(word) for word in text.split(",")]
    except ValueError:
        raise CostError(f"--{option}: {text!r} is not a number or a list of numbers with commas") from None
    return found[0] if len(found) == 1 else found
