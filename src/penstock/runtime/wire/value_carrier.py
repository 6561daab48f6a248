"""Value carrier: moves values between processes that are too large to travel with their head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.runtime.wire.messages import Description, Head
from penstock.runtime.wire.transport import Payload

__all__ = ["Announce", "Introduce", "ValueCarrier"]

Announce = Callable[[int, bytes], None]  # tell the receiver: the number and the bytes that `arrived` gets
Introduce = Callable[[bytes, tuple[int, ...]], None]  # send the receiver's carrier bytes and file descriptors


class ValueCarrier(Protocol):
    """One process's end. A new way to move values is one file with such a class, and a line in `process_lanes`.

    Attributes:
        beside_bytes: values of this size and more are sent by a thread beside compute.
        needs_reader: receives are posted while the lane computes, so a thread must read what is announced.
    """

    beside_bytes: int
    needs_reader: bool

    def send(
        self, to_lane: int, description: Description, payload: Payload, *, announce: Announce, introduce: Introduce
    ) -> None:
        """Send values; announce them before or after they go, as the carrier needs it."""
        ...

    def introduced(self, from_lane: int, body: bytes, descriptor: Callable[[], int]) -> None:
        """Take what the sender's carrier introduced."""
        ...

    def arrived(self, from_lane: int, head: Head, body: bytes) -> Any:  # noqa: ANN401 - the carrier's own
        """Note an announcement; what is returned is handed to `receive`, or to `drop`."""
        ...

    def receive(self, from_lane: int, head: Head, arrived: Any) -> torch.Tensor:  # noqa: ANN401 - the carrier's own
        """Return the bytes of announced values."""
        ...

    def drop(self, from_lane: int, head: Head, arrived: Any) -> None:  # noqa: ANN401 - the carrier's own
        """Forget announced values: they belong to a step that failed."""
        ...

    def forget(self) -> None:
        """Forget what was sent in a step that failed."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
