"""Randomness: the states of all generators that a training may draw from, as plain data, and back."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from penstock.checkpoint.state_as_json import from_plain, to_plain
from penstock.errors import CheckpointError

__all__ = ["generator_states", "set_generator_states"]


def generator_states(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Return the states of torch's generators (the CPU's and those of some devices), Python's and numpy's."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in _gpus(devices)],
        "python": random.getstate(),
    }
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    return to_plain(states, "random states")  # type: ignore[no-any-return]


def set_generator_states(plain: dict[str, Any], devices: Sequence[torch.device]) -> None:
    """Let all generators go on from there; a device that had none then keeps its own.

    Raises:
        CheckpointError: when these are no states of generators.
    """
    states = from_plain(plain)
    try:
        torch.set_rng_state(states["torch"])
        for device, state in zip(_gpus(devices), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
        random.setstate(states["python"])
        if "numpy" in states and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(states["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the random states cannot be taken over: {error}") from error


def _gpus(devices: Sequence[torch.device]) -> list[torch.device]:
    return list(dict.fromkeys(device for device in devices if device.type == "cuda"))
