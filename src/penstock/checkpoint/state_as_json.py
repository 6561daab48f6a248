"""State as JSON: the states of optimizers, schedulers and generators as plain data, and back. Loading runs no code.

JSON has no tuples, no integer keys and no infinity. Such values are written as an object with one key that begins with
"$".
"""

from __future__ import annotations

import base64
import binascii
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from penstock.devices.kinds import kind_of
from penstock.errors import CheckpointError, UsageError
from penstock.tensor_files.tensor_shards import DTYPES, SAFE_NAMES, bytes_of

_PLAIN = {int, bool, str, type(None)}

Keep = Callable[[str, torch.Tensor], str]
Find = Callable[[str], torch.Tensor]


def to_plain(value: Any, where: str, keep: Keep | None = None) -> Any:  # noqa: ANN401, PLR0911 - any value
    """Return a value in a form that JSON can hold.

    Args:
        value: numbers, strings, tensors, and lists, tuples and dicts of them.
        where: the name of the value in error messages.
        keep: stores a tensor elsewhere and returns its name there; by default, tensors are written inline.

    Raises:
        UsageError: for any other type.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        return _tensor(value, where, keep)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _tensor(torch.from_numpy(np.ascontiguousarray(value)), where, None)}
    if isinstance(value, (list, tuple)):
        if _PLAIN.issuperset(map(type, value)):  # fast path for long lists, such as generator states
            return list(value) if isinstance(value, list) else {"$tuple": list(value)}
        items = [to_plain(item, f"{where}[{number}]", keep) for number, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _mapping(value, where, keep)
    raise UsageError(
        f"{where}: a checkpoint holds numbers, strings, tensors, and lists and dicts of them; given: "
        f"{type(value).__module__}.{type(value).__qualname__}"
    )


def _tensor(tensor: torch.Tensor, where: str, keep: Keep | None) -> dict[str, Any]:
    if keep is not None:
        return {"$stored": keep(where, tensor)}
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype not in SAFE_NAMES:
        raise UsageError(f"{where}: a checkpoint cannot hold a tensor of {plain.dtype}")
    data = base64.b64encode(bytes_of(plain)).decode()
    return {"$tensor": [SAFE_NAMES[plain.dtype], list(plain.shape), data]}


def _mapping(value: Mapping[Any, Any], where: str, keep: Keep | None) -> dict[str, Any]:
    if isinstance(value, Counter):
        return {"$counter": _mapping(dict(value), where, keep)}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: to_plain(item, f"{where}.{key}", keep) for key, item in value.items()}
    pairs = [
        [to_plain(key, f"a key of {where}"), to_plain(item, f"{where}.{key}", keep)] for key, item in value.items()
    ]
    return {"$map": pairs}


def from_plain(plain: Any, find: Find | None = None) -> Any:  # noqa: ANN401 - any value
    """Return the value that `to_plain` wrote.

    Args:
        plain: the result of `to_plain`.
        find: returns the stored tensor of a name.

    Raises:
        CheckpointError: if the data are invalid.
    """
    try:
        return _value(plain, find)
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError, binascii.Error) as error:
        raise CheckpointError(f"a state cannot be read: {error!s:.200}") from error


def _value(plain: Any, find: Find | None) -> Any:  # noqa: ANN401 - any value
    if isinstance(plain, list):
        return [_value(item, find) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        key, inner = next(iter(plain.items()))
        if key.startswith("$"):
            return _special(key, inner, find)
    return {key: _value(item, find) for key, item in plain.items()}


def _special(key: str, inner: Any, find: Find | None) -> Any:  # noqa: ANN401 - any value
    if key == "$stored" and find is not None:
        return find(inner)
    if key not in _READERS:
        raise ValueError(f"unknown marker {key[:40]!r}")
    return _READERS[key](inner, find)


def _read_tensor(inner: Any, _: Find | None = None) -> torch.Tensor:  # noqa: ANN401
    dtype, shape, data = inner
    memory = bytearray(base64.b64decode(data, validate=True))
    if not memory:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=torch.uint8).clone().view(DTYPES[dtype]).reshape(shape)


_READERS: dict[str, Callable[[Any, Find | None], Any]] = {
    "$float": lambda inner, _: float(inner),
    "$bytes": lambda inner, _: base64.b64decode(inner, validate=True),
    "$tensor": _read_tensor,
    "$array": lambda inner, find: _value(inner, find).numpy(),
    "$tuple": lambda inner, find: tuple(_value(item, find) for item in inner),
    "$map": lambda inner, find: {_value(key, find): _value(item, find) for key, item in inner},
    "$counter": lambda inner, find: Counter(_value(inner, find)),
}


# ---- random generators


def generator_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of torch's generators (CPU and the given devices), of Python's and of numpy's."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": [kind_of(device).random_state(device) for device in _gpus(devices)],
        "python": random.getstate(),
    }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return to_plain(states, "random states")  # type: ignore[no-any-return]


def set_generator_states(plain: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Restore the states of all generators; a device without a saved state keeps its current one."""
    states = from_plain(plain)
    try:
        torch.set_rng_state(states["torch"])
        for device, state in zip(_gpus(devices), states["cuda"], strict=False):
            kind_of(device).set_random_state(device, state)
        random.setstate(states["python"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random states cannot be restored: {error}") from error


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return list(dict.fromkeys(device for device in devices if device.type == "cuda"))
