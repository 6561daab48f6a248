"""Draws: the random numbers that a loader draws its order from, as they were when its epoch began.

A DataLoader that shuffles draws the order of an epoch at its start, and has no state of its own. To go on in the middle
of an epoch, the same order is drawn again: the generators are set back, the loader starts, the batches that were used
are passed over, and the generators are put where they were. Those that were given to the loader too: someone else may
have drawn from them meanwhile, as a loader for validation that shares one.
"""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.errors import UsageError

__all__ = ["as_at", "check_draws", "draws_of", "own_draws_of", "set_own"]


def draws_of(loader: object) -> dict[str, Any]:
    """Return the states of all generators that a loader may draw from now; JSON can hold them."""
    return _everyones() | own_draws_of(loader)


def own_draws_of(loader: object) -> dict[str, Any]:
    """Return the states of the generators that are a loader's own."""
    return {"own": [_text(generator.get_state()) for generator in _generators_of(loader)]}


def check_draws(loader: object, draws: Mapping[str, Any], *, is_own_only: bool = False) -> None:
    """Raise where states are not those of a loader's generators; nothing is changed.

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
            torch.Generator(generator.device).set_state(_tensor(state))
        if not is_own_only:
            torch.Generator().set_state(_tensor(draws["torch"]))
            random.Random().setstate(_pythons(draws["python"]))  # noqa: S311 - to see whether it takes it
            if "numpy" in draws and "numpy" in sys.modules:
                numpy = sys.modules["numpy"]
                numpy.random.RandomState().set_state(_numpys(draws["numpy"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"state: its random states cannot be read: {error}") from None


def set_own(loader: object, draws: Mapping[str, Any]) -> None:
    """Set the generators that are a loader's own to where they were."""
    for generator, state in zip(_generators_of(loader), draws["own"], strict=True):
        generator.set_state(_tensor(state))


@contextmanager
def as_at(loader: object, draws: Mapping[str, Any] | None, *, keeps_own: bool = True) -> Iterator[None]:
    """Start a loader inside with the generators as they were; afterwards they are where they are now.

    Args:
        loader: what starts.
        draws: their states, checked before; None: as they are.
        keeps_own: put the loader's own back too; else they have moved on.
    """
    if draws is None:
        yield
        return
    now = draws_of(loader)
    try:
        set_own(loader, draws)
        _set_everyones(draws)
        yield
    finally:
        _set_everyones(now)
        if keeps_own:
            set_own(loader, now)


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
    random.setstate(_pythons(states["python"]))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_numpys(states["numpy"]))


def _pythons(plain: Sequence[Any]) -> tuple[Any, ...]:
    version, numbers, gauss = plain
    return version, tuple(numbers), gauss


def _numpys(plain: Sequence[Any]) -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]
    name, keys, *rest = plain
    return name, numpy.array(keys, dtype=numpy.uint32), *rest


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
