"""Config reader: read a file and flags; report all faults at once, each with its line or its flag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.errors import UsageError, nearest
from penstock.launch.config.config import ALIASES, HINTS, Config
from penstock.launch.config.config_checks import faults_of
from penstock.launch.config.flag_values import expected_text, kinds_of, parse_toml, read_value, refusal_of
from penstock.torchrun import environment_faults


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the source of each key: "--lr", "run.toml:3" or "default"."""

    config: Config
    origins: Mapping[str, str]


def name_of(word: str) -> str:
    """Return the name of a key in the schema, from a name with dashes or the name in another tool."""
    name = word.replace("-", "_")
    return ALIASES.get(name, name)


def take_flags(words: Sequence[str], own: Sequence[str]) -> tuple[list[str], list[tuple[str, str]], list[str]]:
    """Split a command line into other words, flags of the schema with their values, and faults of these flags.

    Args:
        words: the words of the command line.
        own: the options of the command itself, which stay among the other words.
    """
    rest: list[str] = []
    flags: list[tuple[str, str]] = []
    faults: list[str] = []
    todo = list(words)
    while todo:
        word = todo.pop(0)
        head, has_value, value = word.partition("=")
        if word == "--":
            return [*rest, word, *todo], flags, faults
        if not word.startswith("--") or head in own:
            rest.append(word)
            continue
        name = name_of(head.removeprefix("--"))
        is_negated = name.startswith("no_") and name not in Config.model_fields
        name = name_of(name.removeprefix("no_")) if is_negated else name
        if name not in Config.model_fields or (is_negated and not _is_switch(name)):
            known = [f"--{key.replace('_', '-')}" for key in Config.model_fields]
            hint = _hint(name) or nearest(head.replace("_", "-"), [*known, *own])
            faults.append(f"{head}: there is no such flag.{hint}")
            if not has_value and todo and not todo[0].startswith("--") and not todo[0].endswith(".toml"):
                todo.pop(0)
        elif _is_switch(name) and not has_value and not (todo and _is_setting(name, todo[0])):
            flags.append((name, "false" if is_negated else "true"))
        elif is_negated:
            faults.append(f"{head}: takes no value")
        elif has_value or todo:
            flags.append((name, value if has_value else todo.pop(0)))
        else:
            faults.append(f"{head}: needs a value")
    return rest, flags, faults


def _hint(name: str) -> str:
    return f" {HINTS[name][0].upper()}{HINTS[name][1:]}" if name in HINTS else ""


def _is_switch(name: str) -> bool:
    return bool in kinds_of(name)


def _is_setting(name: str, word: str) -> bool:
    """Return whether a word is the value of a switch that also takes a table: NAME=VALUE, or a table."""
    return dict in kinds_of(name) and not word.startswith("-") and ("=" in word or word.startswith("{"))


def read_config(path: Path | None, flags: Sequence[tuple[str, str]] = (), faults: Sequence[str] = ()) -> LoadedConfig:
    """Return the configuration of a file and flags; flags override the file.

    Args:
        path: a TOML file; None: only flags and defaults.
        flags: names and texts from `take_flags`.
        faults: faults of the command line, to be reported with the others.

    Raises:
        UsageError: with all faults.
    """
    problems = [*faults, *environment_faults()]
    text = "" if path is None else _text_of(path)
    values, origins = _from_file(path, text, problems)
    for name, word in flags:
        _take_flag(name, word, values, origins, problems)
    config = _validated(values, origins, problems)
    if config is not None:
        problems += [f"{_place(origins, key)}: {what}" for key, what in faults_of(config)]
    if problems or config is None:
        problems = list(dict.fromkeys(problems))
        raise UsageError(problems[0] if len(problems) == 1 else f"{len(problems)} faults:\n  " + "\n  ".join(problems))
    return LoadedConfig(config, {name: origins.get(name, "default") for name in Config.model_fields})


def _text_of(path: Path) -> str:
    if not path.exists():
        # compare stems, since the suffix is always the same
        near = get_close_matches(path.stem, [one.stem for one in path.parent.glob("*.toml")], n=1, cutoff=0.5)
        hint = f" Did you mean {path.with_name(near[0] + '.toml')}?" if near else ""
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise UsageError(
            f"{path}: there is no such file{where}.{hint} To write a first one: penstock train --init {path}"
        )
    try:
        return path.read_text(encoding="utf-8-sig")  # with or without a byte-order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(f"{path}: cannot be read: {reason}") from error


def _from_file(path: Path | None, text: str, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        found = parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for word, value in found.items():
        name = name_of(word)
        origin = f"{path}:{_line_of(text, word)}"
        if name not in Config.model_fields:
            problems.append(
                f"{origin}: {word}: there is no such key.{_hint(name) or nearest(name, Config.model_fields)}"
            )
        elif name in values:
            problems.append(f"{origin}: {word}: is set twice, also at {origins[name]}")
        elif refusal := refusal_of(value):
            problems.append(f"{origin}: {word}: {refusal}")
        else:
            values[name], origins[name] = value, origin
    return values, origins


def _line_of(text: str, word: str) -> int:
    """Return the line of a key at the top level: `word = ...`, `word.x = ...` or `[word]`."""
    for number, line in enumerate(text.splitlines(), 1):
        head = line.strip().lstrip("[").replace('"', "").replace("'", "")
        if head.startswith(word) and head[len(word) :].lstrip()[:1] in ("=", ".", "]"):
            return number
    return 1


def _take_flag(name: str, word: str, values: dict[str, Any], origins: dict[str, str], problems: list[str]) -> None:
    flag = f"--{name.replace('_', '-')}"
    try:
        value = read_value(name, word)
    except ValueError as error:
        problems.append(f"{flag}: {error}")
        return
    if refusal := refusal_of(value):
        problems.append(f"{flag}: {refusal}")
        return
    if isinstance(value, dict) and isinstance(values.get(name), dict):
        value = values[name] | value  # each flag sets one entry of the table
    values[name], origins[name] = value, flag


def _place(origins: Mapping[str, str], key: str) -> str:
    """Return the flag that set a key; or the key, with the line that set it."""
    origin = origins.get(key, "")
    return origin if origin.startswith("--") else f"{origin}: {key}" if origin else key


def _validated(values: dict[str, Any], origins: Mapping[str, str], problems: list[str]) -> Config | None:
    try:
        return Config(**values)
    except ValidationError as error:
        wrong: dict[str, list[Any]] = {}
        for fault in error.errors(include_url=False):
            wrong.setdefault(str(fault["loc"][0]), []).append(fault)
    for key, faults in wrong.items():
        given = values[key]
        problems.append(f"{_place(origins, key)}: must be {expected_text(faults, given)}")
    sound = {key: value for key, value in values.items() if key not in wrong}
    try:  # find further faults
        config = Config(**sound)
    except ValidationError:
        return None
    problems += [
        f"{_place(origins, key)}: {what}" for key, what in faults_of(config) if key not in wrong and key in sound
    ]
    return None
