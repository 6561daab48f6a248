"""TOML text: parse TOML, and refuse values that the parser or the operating system cannot handle."""

from __future__ import annotations

import tomllib
from typing import Any

_MOST_LEVELS = 100  # of nested lists and tables: readers and writers of values recurse once per level
_MOST_BITS = 63  # without the sign: the range of TOML and torch
_MOST_SHOWN = 80  # characters of a value in a message


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text.

    Raises:
        ValueError: if it cannot be read; the message says why.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"is not TOML: {error}") from error
    except RecursionError:
        raise ValueError(f"its lists or tables are nested more than {_MOST_LEVELS} levels deep") from None
    except ValueError:  # from int() of a number with thousands of digits
        raise ValueError("has an integer that does not fit in 64 bits") from None


def refusal_of(value: Any) -> str | None:  # noqa: ANN401 - whatever TOML can hold
    """Return why a value is unusable (nested too deep, too large, or a text with NUL), or None."""
    texts = value if isinstance(value, list) else [value]
    if any(
        isinstance(one, str) and "\0" in one for one in texts
    ):  # values in a table are for the callable, which may accept it
        return f"must not contain a NUL character; given: {value!r:.{_MOST_SHOWN}}"
    level = [value]
    for _ in range(_MOST_LEVELS + 1):
        if any(isinstance(one, int) and one.bit_length() > _MOST_BITS for one in level):
            return "has an integer that does not fit in 64 bits"
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        level = [one for part in inner for one in part]
        if not level:
            return None
    return f"is nested more than {_MOST_LEVELS} levels deep"
