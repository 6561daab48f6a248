"""The registry of models that need only torch: each has a name, a group and a function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["BATCH", "ENTRIES", "Entry", "model"]

BATCH = 4  # the batch size of every example; no other leading dimension may have this size

Builder = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        build: returns the model and an example: a tensor, a tuple of arguments or a dict of keyword arguments.
        group: "plain" for architectures, "pattern" for a pattern that is hard to capture.
        is_single: compared in float32, because the pattern does not appear in float64 (autocast).
        batch_dim: the dimension of the samples in every input.
    """

    build: Builder
    group: str
    is_single: bool = False
    batch_dim: int = 0


ENTRIES: dict[str, Entry] = {}


def model(group: str, *, is_single: bool = False, batch_dim: int = 0) -> Callable[[Builder], Builder]:
    """Register a builder under its own name."""

    def register(build: Builder) -> Builder:
        if build.__name__ in ENTRIES:
            raise ValueError(f"two models are called {build.__name__}")
        ENTRIES[build.__name__] = Entry(build, group, is_single, batch_dim)
        return build

    return register
