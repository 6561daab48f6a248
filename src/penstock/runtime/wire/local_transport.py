"""Local transport: lanes that are threads of one process pass the tensors themselves to each other."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

import torch

from penstock.devices.streams import Event, HostStreams, Streams, Workspace
from penstock.runtime.wire.transport import Key, Payload, Stopped

_POLL_SECONDS = 0.2  # how often a waiting lane checks whether it was stopped


Message = tuple[Payload, Event | None]  # the values, and the event after the work that makes them


class Mailboxes:
    """One queue per lane, and one switch that stops all lanes."""

    def __init__(
        self, num_lanes: int, *, timeout_seconds: float, on_hang: Callable[[int, int, Key], Exception]
    ) -> None:
        self.queues: list[queue.SimpleQueue[tuple[int, Key | None, Message]]] = [
            queue.SimpleQueue() for _ in range(num_lanes)
        ]
        self.timeout_seconds, self.on_hang = timeout_seconds, on_hang
        self.is_stopped = False

    def stop(self) -> None:
        """Wake all waiting lanes, so that they end."""
        self.is_stopped = True
        for box in self.queues:
            box.put((-1, None, ((), None)))

    def reset(self) -> None:
        """Let lanes run again."""
        self.is_stopped = False


class LocalTransport:
    """One lane's end of the mailboxes."""

    def __init__(self, lane: int, boxes: Mailboxes) -> None:
        self.lane, self._boxes = lane, boxes
        self.streams: Streams = HostStreams(torch.device("cpu"))
        self._step = -1
        self._queue = boxes.queues[lane]
        self._here: dict[Key, Message] = {}

    def start(self, step: int, num_samples: int) -> None:  # noqa: ARG002 - all lanes have the same batch
        """Begin a step; discard the messages of earlier steps."""
        self._step = step
        self._here.clear()

    def send(self, key: Key, to_lane: int, payload: Payload) -> None:
        """Send values to a lane."""
        ready = self.streams.mark()
        self._boxes.queues[to_lane].put((self._step, key, (payload, ready)))

    def receive(self, key: Key, from_lane: int, into: Workspace | None = None) -> Payload:
        """Wait for values from a lane, and return them; on a GPU, the lane's stream waits until they are ready."""
        here = self._here
        if key not in here:
            end = time.monotonic() + self._boxes.timeout_seconds
            while key not in here:
                if self._boxes.is_stopped:
                    raise Stopped
                left = end - time.monotonic()
                if left <= 0:
                    raise self._boxes.on_hang(self.lane, from_lane, key)
                self._take(min(left, _POLL_SECONDS))
        payload, ready = here.pop(key)
        return self.streams.bring(payload, ready, into)

    def _take(self, seconds: float) -> None:
        """Take one message out of the queue, if one arrives in time; discard it if it is of an earlier step."""
        try:
            step, key, message = self._queue.get(timeout=seconds)
        except queue.Empty:
            return
        if key is not None and step == self._step:
            self._here[key] = message
