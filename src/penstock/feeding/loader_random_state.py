"""Loader random state: the random states from which a loader draws the order of an epoch.

A DataLoader that shuffles draws the order of an epoch at its start, and has no state of its own. To resume within an
epoch, the same order is drawn again: the generators are set back, the loader starts, the used batches are skipped, and
the generators are set to their current states again. This includes the loader's own generators, because another loader
may share one and have drawn from it since.
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


def draws_of(loader: object) -> dict[str, Any]:
    """Return the states of all generators that a loader may draw from, in a form that JSON can hold."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    if "numpy" in sys.modules:
        name, keys, place, has_gauss, cached = sys.modules["numpy"].random.get_state()
        found["numpy"] = [name, keys.tolist(), int(place), int(has_gauss), float(cached)]
    return found | own_draws_of(loader)


def own_draws_of(loader: object) -> dict[str, Any]:
    """Return the states of the loader's own generators."""
    return {"own": [_text(generator.get_state()) for generator in _generators_of(loader)]}


def check_draws(loader: object, draws: Mapping[str, Any], *, is_own_only: bool = False) -> None:
    """Raise a UsageError if states do not fit a loader's generators; change nothing."""
    try:
        own, states = _generators_of(loader), list(draws["own"])
        if len(own) != len(states):
            raise UsageError(
                f"state: the loader had {len(states)} own generators and now has {len(own)}, so its order would differ"
            )
        for generator, state in zip(own, states, strict=True):
            torch.Generator(generator.device).set_state(_tensor(state))
        if not is_own_only:
            torch.Generator().set_state(_tensor(draws["torch"]))
            random.Random().setstate(_python_state(draws["python"]))  # noqa: S311 - only a check
            if "numpy" in draws and "numpy" in sys.modules:
                numpy = sys.modules["numpy"]
                numpy.random.RandomState().set_state(_numpy_state(draws["numpy"]))
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"state: its random states cannot be read: {error}") from None


def set_own_draws(loader: object, draws: Mapping[str, Any]) -> None:
    """Restore the states of the loader's own generators."""
    for generator, state in zip(_generators_of(loader), draws["own"], strict=True):
        generator.set_state(_tensor(state))


@contextmanager
def restored_draws(loader: object, draws: Mapping[str, Any] | None, *, keeps_own: bool = True) -> Iterator[None]:
    """Restore the generators' states while a loader starts, and set them to their current states again afterwards.

    Args:
        loader: the loader.
        draws: the states, already checked; None changes nothing.
        keeps_own: also set the loader's own generators to their current states again.
    """
    if draws is None:
        yield
        return
    now = draws_of(loader)
    try:
        set_own_draws(loader, draws)
        _set_global_states(draws)
        yield
    finally:
        _set_global_states(now)
        if keeps_own:
            set_own_draws(loader, now)


def _set_global_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(_tensor(states["torch"]))
    random.setstate(_python_state(states["python"]))
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(_numpy_state(states["numpy"]))


def _python_state(plain: Sequence[Any]) -> tuple[Any, ...]:
    version, numbers, gauss = plain
    return version, tuple(numbers), gauss


def _numpy_state(plain: Sequence[Any]) -> tuple[Any, ...]:
    numpy = sys.modules["numpy"]
    name, keys, *rest = plain
    return name, numpy.array(keys, dtype=numpy.uint32), *rest


def _generators_of(loader: object) -> list[torch.Generator]:
    """Return the generators of a loader and its samplers, each once."""
    inside = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), inside, getattr(inside, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
