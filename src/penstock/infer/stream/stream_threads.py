"""Stream threads: the threads of an inference pipeline, and the path of a request through them.

    submit ─► preprocess, copy in ─► stage 0 ─► stage 1 ─► … ─► copy out ─► wait, postprocess ─► its future
              a few threads          one thread each, which        a few threads
                                     only launches and never waits

A request that fails goes directly to the end, with its error. On closing, each group of threads ends after all earlier
groups have ended, so requests in progress are finished.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch

from penstock.devices.cuda import blocking_event
from penstock.devices.cuda_streams import CudaStreams, Event, OnStream, Stream, current_stream
from penstock.devices.kinds import kind_of
from penstock.errors import UsageError
from penstock.infer.stream.stage_runner import StageData, StageRunner, arguments

CLOSED = "the pipeline is closed; make another one"
_EXIT_SECONDS = 10.0  # how long an ending process waits for requests in progress


class RequestSlot:
    """The memory of a request in progress; the number of slots limits the requests in progress.

    On a GPU, a slot has pinned host memory for both directions, and memory on the first device, which later requests
    reuse. It is free again when the GPU has finished its request, so no other synchronisation between requests is
    needed. On a CPU it holds no memory.
    """

    def __init__(self) -> None:
        self._pinned_in, self._on_device, self._pinned_out = (dict[int, torch.Tensor]() for _ in range(3))
        self._done: Event | None = None

    def copy_in(self, values: Sequence[torch.Tensor], streams: CudaStreams) -> tuple[list[torch.Tensor], Event]:
        """Copy tensors to the first device, through pinned memory and in parallel with the work there.

        Args:
            values: tensors in host memory, or on a GPU, made on its current stream.
            streams: the streams of the first stage.

        Returns:
            The copies, and an event after them. The caller must keep the values alive until then.
        """
        staged: list[torch.Tensor] = []
        ready: Event | None = None
        for at, value in enumerate(values):
            if value.is_cuda:
                ready = kind_of(value.device).record_event(value.device)
            is_staged = value.device.type == "cpu" and not value.is_pinned()
            staged.append(_like(self._pinned_in, at, value).copy_(value) if is_staged else value)
        with streams.running(streams.copies):
            buffers = [_like(self._on_device, at, value, streams.device) for at, value in enumerate(staged)]
            found = streams.bring(staged, ready, lambda _: buffers)
            return found, streams.mark()

    def copy_out(self, values: Sequence[torch.Tensor], ready: Event, stream: Stream) -> None:
        """Copy tensors to pinned memory on a stream of their device when they are ready."""
        stream.wait_event(ready)
        with OnStream(stream):
            for at, value in enumerate(values):
                _like(self._pinned_out, at, value).copy_(value, non_blocking=True)
        self.mark_done(stream)

    def mark_done(self, stream: Stream) -> None:
        """Record that the GPU has finished this request at this point of a stream."""
        # a blocking event: the waiting thread sleeps and leaves the CPU to the other threads
        self._done = blocking_event(stream)

    def wait(self) -> None:
        """Wait until the GPU has reached the mark."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None

    def outputs(self, count: int) -> list[torch.Tensor]:
        """Return copies of the outputs, because the slot's memory is reused."""
        return [self._pinned_out[at].clone() for at in range(count)]


def _like(cache: dict[int, torch.Tensor], at: int, value: torch.Tensor, on: torch.device | None = None) -> torch.Tensor:
    """Return memory for a value, on a device or pinned; it is reused while shapes stay the same."""
    old = cache.get(at)
    if old is None or old.shape != value.shape or old.dtype != value.dtype:
        old = cache[at] = torch.empty(value.shape, dtype=value.dtype, device=on or "cpu", pin_memory=on is None)
    return old


@dataclass
class _Job:
    """A request in progress."""

    number: int  # its number, counted from 0
    future: Future[Any]
    request: Any  # the request as given
    # if the request is on a GPU: the event after which it is ready, and the GPU
    made: tuple[Event, torch.device] | None
    slot: RequestSlot
    data: StageData | None = None
    kept: Sequence[torch.Tensor] = ()  # tensors that a copy may still read
    stream: Stream | None = None  # the last stream with work for it, in case an error leaves that work unfinished
    error: BaseException | None = None


class _ThreadGroup:
    """Threads that take jobs from one queue."""

    def __init__(
        self, name: str, work: Callable[[_Job], None], *, count: int = 1, runner: StageRunner | None = None
    ) -> None:
        self.queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._work, self._runner = work, runner
        self.threads = [
            # daemon: user code that hangs must not keep the process alive
            threading.Thread(target=self._run, name=f"penstock-infer-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        with nullcontext() if self._runner is None else self._runner.working():
            while (job := self.queue.get()) is not None:
                self._work(job)
                del job  # otherwise the last request would live while the thread waits

    def end(self, deadline: float) -> None:
        """Let the threads finish their queue, and wait for them until a deadline of the monotonic clock."""
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            left = deadline - time.monotonic()
            thread.join(None if math.isinf(left) else max(0.0, left))


class StreamThreads:
    """The threads of one pipeline; the arguments are those of `penstock.infer.RequestPipeline`."""

    def __init__(
        self, runners: Sequence[StageRunner], preprocess: Callable[[Any], Any] | None,
        postprocess: Callable[[Any], Any] | None, *, depth: int, workers: int,
    ) -> None:  # fmt: skip
        self._runners, self._preprocess, self._postprocess = runners, preprocess, postprocess
        self._is_apart = any(runner.streams is not None for runner in runners)
        self._lock, self._is_closed, self._count = threading.Lock(), False, 0
        self._free: SimpleQueue[RequestSlot | None] = SimpleQueue()  # None: closed
        for _ in range(depth):
            self._free.put(RequestSlot())
        self._before = _ThreadGroup("preprocess", self._prepare, count=workers)
        self._stages = [
            _ThreadGroup(f"stage-{at}", lambda job, at=at: self._compute(job, at), runner=runner)  # type: ignore[misc]
            for at, runner in enumerate(runners)
        ]
        self._after = _ThreadGroup("postprocess", self._finish, count=workers)
        self._groups = [self._before, *self._stages, self._after]

    def submit(self, request: object) -> Future[Any]:
        """Accept a request; wait while the maximum number is in progress.

        Raises:
            UsageError: if the pipeline is closed.
        """
        slot = self._free.get()
        with self._lock:
            if slot is None or self._is_closed:
                self._free.put(None)  # for the next waiting caller
                raise UsageError(CLOSED)
            job = _Job(self._count, Future(), request, _made_on_gpu(request) if self._is_apart else None, slot)
            self._count += 1
            self._before.queue.put(job)
        return job.future

    def close(self, *, timeout: float = math.inf) -> None:
        """Cancel requests that have not started, finish the others and end all threads; wait at most `timeout` s."""
        if self._is_own_thread():
            raise UsageError("close: called in a thread of the pipeline itself, which cannot wait for its own end")
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        while True:
            try:
                job = self._before.queue.get_nowait()
            except Empty:
                break
            if job is not None:
                job.future.cancel()
                job.future.set_running_or_notify_cancel()  # wakes the callers that wait for it
        self._free.put(None)
        deadline = time.monotonic() + timeout
        for group in self._groups:
            group.end(deadline)

    def finalize(self) -> None:
        """Close from any thread: after the last reference is gone, or when the process ends.

        In the first case, nothing is in progress. In the second case, user code that hangs must not keep the process
        alive.
        """
        if self._is_own_thread():
            threading.Thread(target=self.close, name="penstock-infer-close", daemon=True).start()
        else:
            self.close(timeout=_EXIT_SECONDS)

    def _is_own_thread(self) -> bool:
        return any(threading.current_thread() in group.threads for group in self._groups)

    # ---- the path of a request

    def _prepare(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            self._free.put(job.slot)
            return
        request, job.request = job.request, None
        with _Guard(job, "preprocess"):
            if job.made is not None:
                event, device = job.made
                kind_of(device).wait_event(device, event)
            thing = request if self._preprocess is None else self._preprocess(request)
            data = StageData.of(arguments(thing), is_apart=self._is_apart)
            first = self._runners[0].streams
            if first is not None:
                job.kept, job.stream = data.tensors, first.copies
                brought, arrived = job.slot.copy_in(data.tensors, first)
                data = replace(data, tensors=brought, ready=arrived)
            job.data = data
        self._forward(job, self._stages[0])

    def _compute(self, job: _Job, at: int) -> None:
        runner, is_last = self._runners[at], at == len(self._runners) - 1
        with _Guard(job, f"stage {at}" if len(self._runners) > 1 else "the model"):
            assert job.data is not None
            if runner.streams is not None:
                job.stream = runner.streams.compute
            # keep the inputs until the request ends: a GPU may still read them
            job.kept = [*job.kept, *job.data.tensors]
            made = job.data = runner(job.data, is_last=is_last, is_apart=self._is_apart)
            if is_last and made.ready is not None and runner.out is not None:
                job.stream = runner.out
                job.slot.copy_out([tensor for tensor in made.tensors if tensor.is_cuda], made.ready, runner.out)
        self._forward(job, self._after if is_last else self._stages[at + 1])

    def _forward(self, job: _Job, group: _ThreadGroup) -> None:
        (group if job.error is None else self._after).queue.put(job)

    def _finish(self, job: _Job) -> None:
        result: Any = None
        with _Guard(job, "the copy to the host"):
            if job.error is not None and job.stream is not None:
                job.slot.mark_done(job.stream)  # wait for the work launched before the error
            job.slot.wait()
            if job.error is None:
                assert job.data is not None
                result = self._outputs(job.slot, job.data)
        if job.error is None and self._postprocess is not None:
            with _Guard(job, "postprocess"):
                result = self._postprocess(result)
        job.data, job.kept = None, ()
        future, error, slot = job.future, job.error, job.slot
        job.error = None
        self._free.put(slot)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    @staticmethod
    def _outputs(slot: RequestSlot, data: StageData) -> Any:  # noqa: ANN401 - any result
        """Return the result of the last stage, in host memory."""
        on_gpu = [tensor.is_cuda for tensor in data.tensors]
        taken = iter(slot.outputs(sum(on_gpu)))
        return data.open(
            [next(taken) if is_taken else tensor for tensor, is_taken in zip(data.tensors, on_gpu, strict=True)]
        )


class _Guard:
    """Stores an exception in its job, with a note of where it happened."""

    def __init__(self, job: _Job, place: str) -> None:
        self._job, self._place = job, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and self._job.error is None:
            error.add_note(f"in {self._place}, for request {self._job.number} of an inference pipeline")
            self._job.error = error
        return error is not None


def _made_on_gpu(request: object) -> tuple[Event, torch.device] | None:
    """If a request is on a GPU, return an event after which it is ready, and the GPU."""
    args, kwargs = arguments(request)
    on_gpu = (part for part in (*args, *kwargs.values()) if isinstance(part, torch.Tensor) and part.is_cuda)
    found = next(on_gpu, None)
    return None if found is None else (current_stream(found.device).record_event(), found.device)
