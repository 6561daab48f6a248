"""Flag values: convert TOML and the text of a flag to values, refuse unusable values, and describe expected ones."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any, get_args, get_origin

from penstock.errors import nearest
from penstock.launch.config.config import Config

_MOST_LEVELS = 100  # of nested lists and tables: readers and writers of values recurse once per level
_MOST_BITS = 63  # without the sign: the range of TOML and torch
_MOST_SHOWN = 80  # characters of a value in a message
_SWITCHED = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_toml(text: str) -> dict[str, Any]:
    """Return the values of a TOML text; raise a ValueError that says why it cannot be read."""
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
    # values in a table are for the callable, which may accept it
    if any(isinstance(one, str) and "\0" in one for one in texts):
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


def kinds_of(name: str) -> set[type]:
    """Return the plain types of a key."""
    found: set[type] = set()
    todo: list[Any] = [Config.model_fields[name].annotation]
    while todo:
        kind = todo.pop()
        origin = get_origin(kind)
        if isinstance(kind, type) and origin is None:
            found.add(kind)
        elif origin in (list, dict):
            found.add(origin)
        elif hasattr(kind, "__metadata__"):
            todo.append(kind.__origin__)
        else:
            todo += [type(word) if isinstance(word, (str, bool)) else word for word in get_args(kind)]
    return found - {type(None)}


def read_value(name: str, word: str) -> Any:  # noqa: ANN401 - depends on the key
    """Return the value of a flag from its text; raise a ValueError if the text is invalid.

    >>> read_value("lr", "1e-3"), read_value("schedule", "1f1b"), read_value("devices", "cpu,cpu")
    (0.001, '1f1b', ['cpu', 'cpu'])
    >>> read_value("model_args", "width=128"), read_value("graphs", "false")
    ({'width': 128}, False)
    >>> read_value("batch_dim", "1"), read_value("batch_dim", "x=1")
    (1, {'x': 1})
    """
    kinds = kinds_of(name)
    if bool in kinds and word.lower() in _SWITCHED:
        return _SWITCHED[word.lower()]
    if {int, dict} <= kinds and word.strip().isdecimal():
        return int(word)
    if dict in kinds and (str not in kinds or word.lstrip().startswith("{")):
        return _table(word)
    if list in kinds and ("," in word or str not in kinds):
        return [_scalar(part.strip(), kinds) for part in word.split(",") if part.strip()]
    return _scalar(word, kinds)


def _table(word: str) -> dict[str, Any]:
    if word.lstrip().startswith("{"):
        try:
            return dict(parse_toml(f"x = {word}")["x"])
        except (ValueError, KeyError):
            raise ValueError(f"{word!r:.80} is not a table, such as {{width = 128}}") from None
    name, has_value, value = word.partition("=")
    if not has_value or not name.strip():
        raise ValueError(f"must be NAME=VALUE, one flag per name; given: {word!r}")
    return {name.strip(): _free(value.strip())}


def _free(word: str) -> Any:  # noqa: ANN401 - whatever TOML can hold
    """Return the TOML value of a text, or the text itself if it is not TOML."""
    try:
        found = parse_toml(f"x = {word}")
    except ValueError:
        return word
    return found["x"] if len(found) == 1 else word


def _scalar(word: str, kinds: set[type]) -> Any:  # noqa: ANN401 - depends on the key
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(word)
            except ValueError:
                continue
    return word


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "finite_number": "a finite number",
}


def expected_text(faults: Sequence[Any], given: Any) -> str:  # noqa: ANN401 - whatever was given
    """Return the expected value of a key as text, from the faults that pydantic found."""
    words: list[str] = []
    hint = ""
    for fault in faults:
        context = fault.get("ctx", {})
        kind = fault["type"]
        if kind == "literal_error":
            choices = [word.strip("'") for word in str(context["expected"]).replace(" or ", ", ").split(", ")]
            words.append(f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0])
            hint = nearest(str(given), choices) if isinstance(given, str) else ""
        elif kind == "greater_than_equal":
            words.append(f"{context['ge']:g} or more")
        elif kind == "greater_than":
            words.append(f"more than {context['gt']:g}")
        else:
            words.append(_WANTED.get(kind, str(fault["msg"])))
    return f"{' or '.join(dict.fromkeys(words))}; given: {given!r:.80}{'.' + hint if hint else ''}"
