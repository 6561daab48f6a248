"""Draws: the random numbers that a loader draws its order from, as they were when its epoch began.

A DataLoader that shuffles draws the order of an epoch at its start, and has no state of its own. To go on in the middle
of an epoch, the same order is drawn again: the generators are set back, the loader starts, the batches that were used
are passed over, and the generators that are everyone's are put where they were.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import UsageError

__all__ = ["as_at", "draws_of", "own_draws_of", "set_own"]


def draws_of(loader: object) -> dict[str, Any]:
    """Return the states of all generators that a loader may draw from now; JSON can hold them."""
    return _everyones() | own_draws_of(loader)


def own_draws_of(loader: object) -> dict[str, Any]:
    """Return the states of the generators that are a loader's own."""
    return {"own": [_text(generator.get_state()) for generator in _generators_of(loader)]}


def set_own(loader: object, draws: Mapping[str, Any]) -> None:
    """Set the generators that are a loader's own to where they were.

    Raises:
        UsageError: when it has others, or these are no states of generators.
    """
    try:
        own, states = _generators_of(loader), list(draws["own"])
        if len(own) != len(states):
            raise UsageError(
                f"state: the loader had {len(states)} generators of its own, and has {len(own)}: its order is another"
            )
        for generator, state in zip(own, states, strict=True):
            generator.set_state(_tensor(state))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise error if isinstance(error, UsageError) else _unreadable(error) from None


@contextmanager
def as_at(loader: object, draws: Mapping[str, Any] | None) -> Iterator[None]:
    """Start a loader inside with the generators as they were; afterwards only its own ones have moved on.

    Raises:
        UsageError: when these are not the states of a loader's generators.
    """
    if draws is None:
        yield
        return
    now = _everyones()
    try:
        set_own(loader, draws)
        try:
            _set_everyones(draws)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise _unreadable(error) from None
        yield
    finally:
        _set_everyones(now)


def _unreadable(error: Exception) -> UsageError:
    return UsageError(f"state: its random states cannot be read: {error}")


def _everyones() -> dict[str, Any]:
    """Return the states of the generators that anybody may draw from."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    if "numpy" in sys.modules:
        name, keys, place, has_gauss, cached = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, keys.tolist(), int(place), int(has_gauss), float(cached)]
    return found


def _set_everyones(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(_tensor(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators that a loader and its samplers were given, each once."""
    inside = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), inside, getattr(inside, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
