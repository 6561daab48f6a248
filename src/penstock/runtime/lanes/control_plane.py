"""Control plane: the messages and agreements between the processes of a pipeline, beside the values of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import PenstockError, UsageError, error_in_short
from penstock.runtime.lanes.batch_comparison import BatchComparison
from penstock.runtime.step import Step
from penstock.runtime.wire.process_transport import PING, ProcessTransport

_PINGS = 8


class OneProcess:
    """The control plane of a single process: there are no others. `ProcessControl` describes the methods."""

    def refuse(self, step: int, error: BaseException) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Do nothing."""

    def decide(self, choose: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the choice of this process."""
        return choose()

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """Return a list of this process's value only."""
        return [thing]

    def agree(self, step: Step, what: str, thing: Any) -> list[Any]:  # noqa: ANN401, ARG002 - any JSON value
        """Return a list of this process's value only."""
        return [thing]

    def clock_offset(self) -> float:
        """Return zero: all lanes use one clock."""
        return 0.0


class ProcessControl:
    """The messages of a lane that is a process to the other processes. They can contain any JSON value."""

    def __init__(self, transport: ProcessTransport) -> None:
        self._transport, self._lane = transport, transport.lane
        self._others = tuple(sorted(transport.links.peers))
        self._num_lanes = len(self._others) + 1
        self._count_of: dict[str, int] = {}
        self._has_failed = False
        self._batches = BatchComparison(transport, self._num_lanes)

    # ---- a step

    def begin(self, step: Step) -> None:
        """Begin a step. After a failure, lanes may have stopped in different steps, so continue with the latest."""
        if self._has_failed:
            self._transport.recover()
            step.number = max(self.gather(step.number))
            self._has_failed = False
            self._batches.clear()

    def start(self, step: Step) -> None:
        """Begin a step in the transport; raise if a lane has refused the step, even if that lane has left since."""
        self._transport.start(step.number, sum(step.batch.sizes))
        self._transport.check()

    def begin_comparison(self, step: Step) -> None:
        """Begin to compare the step's batch with those of the other processes."""
        self._batches.look(step)

    def end_call(self) -> None:
        """Raise in all processes if their batches differ."""
        with self.coordinated():
            found = self._batches.compare()
        if found:
            raise UsageError(found)

    @contextmanager
    def coordinated(self) -> Iterator[None]:
        """Tell the other processes about a failure inside the block; before the next step, all agree on a new start."""
        try:
            yield
        except BaseException as error:
            # after a refusal all processes are at the same step, because none of them ran it
            self._has_failed = self._has_failed or not getattr(error, "was_not_started", False)
            self._batches.forget_latest()  # the process that refused has none
            if not getattr(error, "was_reported", False):
                self._transport.abort(error)
            raise

    def refuse(self, step: int, error: BaseException) -> None:
        """Tell the other processes that this process does not begin a step."""
        self._transport.refuse(step, error)

    def fail(self, error: BaseException) -> None:
        """Tell the other processes which error ends this process outside of a step; any thread may call this."""
        self._has_failed = True
        self._transport.abort(error)

    # ---- agreement

    def decide(self, choose: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the settings of all processes, which must be the same; let the first choose for all.

        Raises:
            UsageError: if settings differ, or if the first process cannot choose.
        """
        everyone = self.gather(dict(settings))
        differing = [
            f"{name}: " + ", ".join(f"{given.get(name)} (lane {lane})" for lane, given in enumerate(everyone))
            for name in settings
            if len({str(given.get(name)) for given in everyone}) > 1
        ]
        if differing:
            raise UsageError("the processes were not given the same pipeline: " + "; ".join(differing))
        chosen: dict[str, Any] = {}
        failure: PenstockError | None = None
        if self._lane == 0:
            try:
                chosen = {"chosen": choose()}
            except PenstockError as error:
                chosen, failure = {"error": error_in_short(error)}, error
        found: dict[str, Any] = self.gather(chosen)[0]
        if failure is not None:
            raise failure
        if "error" in found:
            raise UsageError(f"lane 0 could not decide: {found['error']}")
        plan: dict[str, Any] = found["chosen"]
        return plan

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """Return the values that all processes gave, in the order of their lanes."""
        return self._exchange(self._next("gather"), thing)

    def agree(self, step: Step, what: str, thing: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        """Return the values that all processes gave before or in a step; raise if one refuses it or fails."""
        self.begin(step)
        with self.coordinated():
            self.start(step)
            return self._exchange(f"{what} {step.number}", thing)

    def _exchange(self, name: str, thing: Any) -> list[Any]:  # noqa: ANN401 - any JSON value
        for other in self._others:
            self._transport.send_message(other, name, thing)
        return [
            thing if lane == self._lane else self._transport.receive_message(lane, name)
            for lane in range(self._num_lanes)
        ]

    def _next(self, what: str) -> str:
        self._count_of[what] = self._count_of.get(what, 0) + 1
        return f"{what} {self._count_of[what]}"

    # ---- one clock

    def clock_offset(self) -> float:
        """Return the seconds to add to this process's clock to get lane 0's, measured in the fastest round trip.

        A message is assumed to take half of the round trip. All processes call this; lane 0 answers one after another.
        """
        if self._lane == 0:
            for other in self._others:
                self._transport.receive_message(other, self._next(f"clock of {other}"))
            return 0.0
        best = (float("inf"), 0.0)
        for _ in range(_PINGS):
            self._transport.links.send(0, PING, f"{time.monotonic_ns()},".encode())
            sent, theirs, back = self._transport.receive_message(0, "pong")
            best = min(best, (back - sent, theirs - (sent + back) / 2))
        self._transport.send_message(0, self._next(f"clock of {self._lane}"), True)
        return best[1] / 1e9
