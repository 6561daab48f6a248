"""Value carrier: the interface that moves values that are too large to travel with their head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.runtime.wire.messages import Description, Head
from penstock.runtime.wire.transport import Payload

Announce = Callable[[int, bytes], None]  # sends the number and the bytes that the receiver's `arrived` gets
Introduce = Callable[[bytes, tuple[int, ...]], None]  # sends bytes and file descriptors to the receiver's carrier


class ValueCarrier(Protocol):
    """One process's end of a value carrier. To add a carrier, write such a class, and a line in `process_lanes`.

    Attributes:
        threaded_bytes: the size from which a separate thread sends the values while the lane computes.
        needs_reader: whether receives are posted while the lane computes, so that a thread must read announcements.
    """

    threaded_bytes: int
    needs_reader: bool

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
