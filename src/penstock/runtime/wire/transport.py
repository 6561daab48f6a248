"""Transport: the interface through which lanes send and receive values. The executor uses no other part of `wire`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from penstock.devices.streams import Workspace
from penstock.schedule.actions import Kind

# Mostly tensors; None if there is no gradient; also plain numbers that a stage passes on.
Payload = Sequence[Any]


class Key(NamedTuple):
    """The name of a message: an activation (F) or a gradient (B) of a micro-batch, from one stage to another.

    Values outside of the schedule have the kind R; their source is a lane.
    """

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
    """Another lane failed, so this lane ends quietly."""


class Transport(Protocol):
    """One lane's end of the transport."""

    def start(self, step: int, num_samples: int) -> None:
        """Begin a step with a batch of `num_samples` samples; discard the messages of earlier steps."""
        ...

    def send(self, key: Key, to_lane: int, payload: Payload) -> None:
        """Send values to a lane, without waiting until it receives them."""
        ...

    def receive(self, key: Key, from_lane: int, into: Workspace | None = None) -> Payload:
        """Wait for values from a lane, and return them, in the memory that `into` returns if it is given.

        Raises:
            Stopped: if another lane failed.
            HangError: if the values did not arrive in time.
            LostError: if the process of the other lane is gone.
        """
        ...
