"""Lane links: how jobs and their values go from lane to lane, between threads or between processes."""

from __future__ import annotations

import queue
from typing import Protocol

from penstock.errors import HangError, LaneError
from penstock.infer.generation.generation_job import Job
from penstock.infer.generation.lane_values import Values
from penstock.runtime.lanes.process_lanes import ProcessLanes
from penstock.runtime.wire.transport import Key

Message = tuple[Job, Values]


class Links(Protocol):
    """One lane's links to the next lane and from the lane before; the last lane's next lane is the first."""

    def send(self, job: Job, values: Values) -> None:
        """Send a job to the next lane; do not wait."""
        ...

    def receive(self) -> Message:
        """Wait for the next job from the lane before, and return it.

        Raises:
            LaneError: if another lane failed, or if nothing arrived in time.
        """
        ...


class ThreadLinks:
    """The links of a lane that is a thread."""

    def __init__(self, lane: int, queues: list[queue.SimpleQueue[Message | BaseException]], seconds: float) -> None:
        self._lane, self._own, self._seconds = lane, queues[lane], seconds
        self._next, self._all = queues[(lane + 1) % len(queues)], queues

    def send(self, job: Job, values: Values) -> None:
        """Send a job to the next lane."""
        self._next.put((job, values))

    def receive(self) -> Message:
        """Wait for a job from the lane before."""
        try:
            message = self._own.get(timeout=self._seconds)
        except queue.Empty:
            raise HangError(f"lane {self._lane} has waited {self._seconds:g} s for a job to generate") from None
        if isinstance(message, BaseException):
            raise message
        return message

    def fail(self, error: BaseException) -> None:
        """Tell all lanes that this lane failed."""
        for at, other in enumerate(self._all):
            if at != self._lane:
                other.put(error)


class ProcessLinks:
    """The links of a lane that is a process."""

    def __init__(self, group: ProcessLanes) -> None:
        self._lane, self._num_lanes = group.lane, group.num_lanes
        (self._transport,) = group.transports.values()
        self._transport.start(1, 1)
        self._num_sent = self._num_received = 0

    def send(self, job: Job, values: Values) -> None:
        """Send a job to the next lane."""
        target = (self._lane + 1) % self._num_lanes
        numbers = job.to_numbers((len(values.tensors), *values.form))
        tensors = [numbers, values.tokens.contiguous(), *(t.detach() for t in (*values.tensors, *values.extras))]
        self._transport.send(Key("R", self._lane, target, self._num_sent), target, tensors)
        self._num_sent += 1

    def receive(self) -> Message:
        """Wait for a job from the lane before."""
        source = (self._lane - 1) % self._num_lanes
        numbers, tokens, *rest = self._transport.receive(Key("R", source, self._lane, self._num_received), source)
        self._num_received += 1
        job, (count, *form) = Job.from_numbers(numbers.cpu())
        return job, Values(tokens, tuple(form), tuple(rest[:count]), tuple(rest[count:]))


def lane_error(lane: int, error: BaseException) -> LaneError:
    """Return the error that the user sees when a lane failed."""
    made = LaneError(f"lane {lane} failed while it generated: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made
