"""Transport: how values get from one lane to another. The executor knows only this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from penstock.devices.streams import Workspace
from penstock.schedule.actions import Kind

__all__ = ["Key", "Payload", "Stopped", "Transport"]

# Tensors mostly; None where there is no gradient; plain numbers that a stage hands on.
Payload = Sequence[Any]


class Key(NamedTuple):
    """The name of a message: an activation (F) or a gradient (B), from one stage to another, of a micro-batch."""

    kind: str
    source: int
    target: int
    mb: int

    @classmethod
    def of(cls, kind: Kind, stage: int, peer: int, mb: int) -> Key:
        """Return the key that a send and its receive have in common."""
        source, target = (stage, peer) if kind in (Kind.SEND_F, Kind.SEND_B) else (peer, stage)
        return cls("F" if kind in (Kind.SEND_F, Kind.RECV_F) else "B", source, target, mb)

    def __str__(self) -> str:
        what = "the activation" if self.kind == "F" else "the gradient"
        return f"{what} that stage {self.source} sends to stage {self.target} for micro-batch {self.mb}"


class Stopped(Exception):  # noqa: N818 - not an error of this lane
    """Another lane failed: this one ends quietly."""


class Transport(Protocol):
    """One lane's end of it."""

    def start(self, step: int, num_samples: int) -> None:
        """Begin a step with a batch of so many samples: what is left of earlier ones is thrown away."""
        ...

    def send(self, key: Key, to_lane: int, payload: Payload) -> None:
        """Hand values to a lane; never waits for it."""
        ...

    def receive(self, key: Key, from_lane: int, into: Workspace | None = None) -> Payload:
        """Return values from a lane, when they are there; where `into` says, on a GPU.

        Raises:
            Stopped: when another lane failed.
            HangError: when it took too long.
            LostError: when the other side is gone.
        """
        ...
