"""Config writer: write a resolved configuration with the sources of its values, and an example file, as TOML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from penstock.launch.config.config import Config, keys_by_group
from penstock.launch.config.config_reader import LoadedConfig

_WIDTH = 100


def toml_value(value: Any) -> str:  # noqa: ANN401 - whatever TOML can hold
    """Return a value in the syntax of TOML.

    >>> print(toml_value({"width": 128, "names": ["a", "b'c"], "is_big": False}))
    {width = 128, names = ["a", "b'c"], is_big = false}
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(name)} = {toml_value(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return str(value)  # dates and times


def _toml_key(name: str) -> str:
    is_bare = bool(name) and all(char.isascii() and (char.isalnum() or char in "_-") for char in name)
    return name if is_bare else toml_value(name)


def to_toml(given: LoadedConfig) -> str:
    """Return all keys of a configuration, with the source of each value."""
    lines = []
    for group, names in keys_by_group().items():
        lines += ["", f"# {group}"]
        for name in names:
            value, origin = getattr(given.config, name), given.origins.get(name, "default")
            lines.append(f"# {name} is not set" if value is None else f"{name} = {toml_value(value)}  # {origin}")
    return "\n".join(lines[1:]) + "\n"


def origins_in(text: str) -> dict[str, str]:
    """Return the source of each value from a text of `to_toml`."""
    lines = [line for line in text.splitlines() if "  # " in line]
    return {line.partition(" = ")[0]: line.rpartition("  # ")[2] for line in lines}


def example_file() -> str:
    """Return an example file: each key with its meaning and, as a comment, its default."""
    lines = [
        "# The configuration of `penstock train`: all keys with their defaults. Remove the # from the keys you change.",
        "# Each key is also a flag, such as --micro-batches 8. Flags override this file.",
    ]
    for group, names in keys_by_group().items():
        lines += ["", f"# ---- {group}"]
        for name in names:
            field = Config.model_fields[name]
            default = field.get_default(call_default_factory=True)
            lines += ["", *(f"# {line}" for line in textwrap.wrap(field.description or "", _WIDTH))]
            lines.append(f"# {name} = {_SAMPLES[name] if default is None else toml_value(default)}")
    return "\n".join(lines) + "\n"


_SAMPLES = {  # of the keys without a default
    "weights": '"my_model"',
    "weight": '"sum"',
    "schedule": '"1f1b"',
    "validation": '"my_data.py:validation"',
    "weight_decay": "0.1",
    "clip": "1.0",
    "lanes": "2",
    "plan": '"plan.json"',
    "devices": '["cuda:0", "cuda:1"]',
    "micro_batches": "8",
    "stages_per_lane": "2",
    "memory_limit": '"16GiB"',
    "max_seconds": "3600.0",
    "nproc": "2",
    "node_rank": "0",
    "rdzv_endpoint": '"host0:29400"',
    "rdzv_id": '"my-run"',
    "log_dir": '"logs"',
}
