"""Thread lanes: one worker thread per lane of a process. They run the steps; if one lane fails, all stop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.devices.streams import Streams, make_streams, ordered_step
from penstock.errors import HangError, LaneError
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.control_plane import OneProcess
from penstock.runtime.lanes.hang_report import stack_of_thread
from penstock.runtime.lanes.shared_values import OneProcessValues
from penstock.runtime.lanes.status_board import StatusBoard, explain_wait
from penstock.runtime.step import Step
from penstock.runtime.wire.local_transport import LocalTransport, Mailboxes
from penstock.runtime.wire.transport import Key, Stopped

_GRACE_SECONDS = 4.0  # time for the other lanes to end after one has failed

Task = Callable[[], None]


class ThreadLanes:
    """All lanes of a pipeline, as threads of this process."""

    def __init__(self, devices: Sequence[torch.device], *, timeout_seconds: float, num_threads: int | None) -> None:
        self._devices, self._timeout_seconds, self._num_threads = devices, timeout_seconds, num_threads
        self.lanes = tuple(range(len(devices)))
        self.control, self.values = OneProcess(), OneProcessValues()
        self.streams: Mapping[int, Streams] = {}
        self._board = StatusBoard.empty(len(devices))
        self.rows = {lane: self._board.row(lane) for lane in self.lanes}
        self._executors: Sequence[Executor] = ()
        self._start()

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:
        """Make the streams; the lanes of one group hold the same tensors."""
        self.streams = make_streams(dict(enumerate(self._devices)), groups)

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time that a lane waits for a value."""
        self._timeout_seconds = self._boxes.timeout_seconds = seconds

    def _start(self) -> None:
        self._boxes = Mailboxes(len(self.lanes), timeout_seconds=self._timeout_seconds, on_hang=self._hang)
        self.transports = {lane: LocalTransport(lane, self._boxes) for lane in self.lanes}
        self._tasks: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in self.lanes]
        self._ends: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_work,
                args=(lane, self._tasks[lane], self._ends, self._num_threads),
                name=f"penstock-lane-{lane}",
                daemon=True,  # a lane that hangs in the user's code must not keep the process alive
            )
            for lane in self.lanes
        ]
        for thread in self._threads if len(self.lanes) > 1 else ():
            thread.start()

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run a step on the lanes of this process, ordered after the caller's earlier work.

        Raises:
            LaneError: if an action failed on any lane; the other lanes have been stopped.
        """
        is_replay = step.tapes is not None and all(tape.is_replay for tape in step.tapes.values())
        with ordered_step(self.streams, may_lend=is_replay and spans is None):
            self._run(executors, step, spans)

    def _run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        self._executors = executors
        self._boxes.reset()
        if len(self.lanes) == 1:  # a single lane needs no thread of its own: it runs on the caller's
            executors[0].transport = self.transports[0]
            executors[0].run(step, None if spans is None else spans[0])
            return
        if not self._threads:
            self._start()
        for lane, executor in enumerate(executors):
            executor.transport = transport = self.transports[lane]
            transport.streams = self.streams[lane]
            mine = None if spans is None else spans[lane]
            self._tasks[lane].put(lambda executor=executor, mine=mine: executor.run(step, mine))  # type: ignore[misc]
        self._wait()

    def _wait(self) -> None:
        left, first = set(self.lanes), None
        try:
            while left:
                lane, error = self._ends.get()
                left.discard(lane)
                if error is not None:
                    first = error
                    break
        except BaseException:  # Ctrl-C: no lane may continue in the background
            self._stop(left)
            raise
        if first is None:
            return
        error = self._stop(left, first)
        raise error

    def _stop(self, left: set[int], first: BaseException | None = None) -> BaseException:
        """Stop all lanes; return the most useful error: a lane's own error comes before that of a lane that waited."""
        self._boxes.stop()
        end = time.monotonic() + _GRACE_SECONDS
        errors = [first] if first is not None else []
        while left and (remaining := end - time.monotonic()) > 0:
            try:
                lane, error = self._ends.get(timeout=remaining)
            except queue.Empty:
                break
            left.discard(lane)
            errors += [error] if error is not None else []
        if left:  # these hang in the user's code: continue without them
            self._threads = []
        told = [e for e in errors if not isinstance(e, Stopped)]
        own = [e for e in told if not isinstance(e, HangError)]
        return (own or told or [LaneError("the lanes were stopped")])[0]

    def _hang(self, lane: int, from_lane: int, key: Key) -> HangError:
        program_of = self._executors[lane].program_of
        doing, hanging_lane = explain_wait(self._board, from_lane, finder=lane, program_of=program_of)
        error = HangError(
            f"lane {lane} has waited {self._timeout_seconds:g} s for {key} from lane {from_lane}, which is {doing}"
        )
        stack = stack_of_thread(self._threads[hanging_lane].ident) if self._threads else ""
        if stack:
            error.add_note(f"lane {hanging_lane}: {stack}")
        return error

    def close(self) -> None:
        """Stop the lanes."""
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=_GRACE_SECONDS)
        self._threads = []


def _work(
    lane: int, tasks: queue.SimpleQueue[Task | None], ends: queue.SimpleQueue[tuple[int, BaseException | None]],
    num_threads: int | None,
) -> None:  # fmt: skip
    """Run the tasks of a lane until None arrives."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException as error:  # goes to the thread that called `run`
            ends.put((lane, error))
        else:
            ends.put((lane, None))
        del task  # otherwise the last step stays in memory while the thread waits
