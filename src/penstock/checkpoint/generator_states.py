"""Generator states: the states of all random generators that a training may use, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from penstock.checkpoint.state_as_json import from_plain, to_plain
from penstock.devices.kinds import kind_of
from penstock.errors import CheckpointError


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
    """Restore the states of all generators; a device without a saved state keeps its current one.

    Raises:
        CheckpointError: if the data are not generator states.
    """
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
