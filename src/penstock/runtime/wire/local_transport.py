"""LocalTransport: lanes of one process hand each other the tensors themselves."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from penstock.devices.streams import Event, HostStreams, Streams, Workspace
from penstock.runtime.wire.transport import Key, Payload, Stopped

__all__ = ["LocalTransport", "Mailboxes"]

_LOOK_SECONDS = 0.2  # how often a lane that waits looks whether it was stopped


Message = tuple[Payload, Event | None]  # values, and the event behind what makes them


class Mailboxes:
    """A queue a lane, and the one switch that stops them all."""

    def __init__(
        self, num_lanes: int, *, timeout_seconds: float, on_hang: Callable[[int, int, Key], Exception]
    ) -> None:
        self.queues: list[queue.SimpleQueue[tuple[int, Key | None, Message]]] = [
            queue.SimpleQueue() for _ in range(num_lanes)
        ]
        self.timeout_seconds, self.on_hang = timeout_seconds, on_hang
        self.is_stopped = False

    def stop(self) -> None:
        """Wake all lanes that wait; they end."""
        self.is_stopped = True
        for box in self.queues:
            box.put((-1, None, ((), None)))

    def reset(self) -> None:
        """Let lanes run again."""
        self.is_stopped = False


class LocalTransport:
    """One lane's end of the mailboxes.

    Attributes:
        streams: of the lane.
    """

    def __init__(self, lane: int, boxes: Mailboxes) -> None:
        self.lane, self._boxes = lane, boxes
        self.streams: Streams = HostStreams(torch.device("cpu"))
        self._step = -1
        self._queue = boxes.queues[lane]
        self._here: dict[Key, Message] = {}

    def start(self, step: int, num_samples: int) -> None:  # noqa: ARG002 - all lanes have the same batch
        """Begin a step: what is left of earlier ones is thrown away."""
        self._step = step
        self._here.clear()

    def send(self, key: Key, to_lane: int, payload: Payload) -> None:
        """Hand values to a lane."""
        ready = self.streams.mark()
        self._boxes.queues[to_lane].put((self._step, key, (payload, ready)))

    def receive(self, key: Key, from_lane: int, into: Workspace | None = None) -> Payload:
        """Return values from a lane, when they are there; on a GPU, when the lane's stream can wait for them."""
        here = self._here
        if key not in here:
            end = time.monotonic() + self._boxes.timeout_seconds
            while key not in here:
                if self._boxes.is_stopped:
                    raise Stopped
                left = end - time.monotonic()
                if left <= 0:
                    raise self._boxes.on_hang(self.lane, from_lane, key)
                self._take(min(left, _LOOK_SECONDS))
        payload, ready = here.pop(key)
        return self.streams.bring(payload, ready, into)

    def _take(self, seconds: float) -> None:
        """Take one message out of the queue, if there is one in time; those of an earlier step are thrown away."""
        try:
            step, key, message = self._queue.get(timeout=seconds)
        except queue.Empty:
            return
        if key is not None and step == self._step:
            self._here[key] = message
