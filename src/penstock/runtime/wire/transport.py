"""Transport: the interface through which lanes send and receive values, and that of carriers of large values.

The executor uses no other part of `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from penstock.devices.streams import Workspace
from penstock.schedule.actions import Kind

if TYPE_CHECKING:
    from penstock.runtime.wire.messages import Description, Head

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


Announce = Callable[[int, bytes], None]  # sends the number and the bytes that the receiver's `arrived` gets
Introduce = Callable[[bytes, tuple[int, ...]], None]  # sends bytes and file descriptors to the receiver's carrier


class ValueCarrier(Protocol):
    """One process's end of a value carrier; docs/design/architecture.md says how to add one."""

    threaded_bytes: int  # the size from which a separate thread sends the values while the lane computes
    needs_reader: bool  # whether receives are posted while the lane computes, so that a thread must read announcements

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce, introduce: Introduce
    ) -> None:
        """Send values; announce them before or afterwards, as the carrier needs it."""
        ...

    def introduced(self, from_lane: int, body: bytes, descriptor: Callable[[], int]) -> None:
        """Take the bytes and file descriptors that the sender's carrier sent with `introduce`."""
        ...

    def arrived(self, from_lane: int, head: Head, body: bytes) -> Any:  # noqa: ANN401 - the carrier's type
        """Handle an announcement; `receive` or `drop` gets the result."""
        ...

    def receive(self, from_lane: int, head: Head, arrived: Any) -> torch.Tensor:  # noqa: ANN401 - the carrier's type
        """Return the bytes of announced values."""
        ...

    def drop(self, from_lane: int, head: Head, arrived: Any) -> None:  # noqa: ANN401 - the carrier's type
        """Discard announced values of a failed step."""
        ...

    def forget(self) -> None:
        """Discard values that were sent in a failed step."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...
