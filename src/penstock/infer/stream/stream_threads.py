"""Works: the threads of an inference pipeline, and the way of a request through them.

    submit ─► preprocess, copy in ─► stage 0 ─► stage 1 ─► … ─► copy out ─► wait, postprocess ─► its future
              a few threads          a thread each, which only             a few threads
                                     launch and never wait

A request that fails anywhere goes straight to the end, with its error. Each part ends when it is told to, after all
that come before it have ended, so what was begun is finished.
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

from penstock.devices.cuda_streams import Event, Stream, current_stream
from penstock.devices.kinds import kind_of
from penstock.errors import UsageError
from penstock.infer.stream.request_slots import RequestSlot
from penstock.infer.stream.stage_runner import Line, Parcel, arguments

__all__ = ["CLOSED", "Works"]

CLOSED = "the pipeline is closed; make another one"
_SECONDS_AT_EXIT = 10.0  # that a process waits for requests whose results nobody waits for


@dataclass
class _Ticket:
    """A request on its way.

    Attributes:
        number: the how-manieth it is.
        future: of its result.
        request: as it was given.
        made: behind what makes the request on a GPU, if that is where it is, and on which.
        seat: its memory.
        parcel: how far it has come.
        kept: tensors that a copy may still read.
        stream: the last one that was given work for it, where an error would leave some of it undone.
        error: what went wrong.
    """

    number: int
    future: Future[Any]
    request: Any
    made: tuple[Event, torch.device] | None
    seat: RequestSlot
    parcel: Parcel | None = None
    kept: Sequence[torch.Tensor] = ()
    stream: Stream | None = None
    error: BaseException | None = None


class _Part:
    """Threads that take tickets from one queue."""

    def __init__(self, name: str, work: Callable[[_Ticket], None], *, count: int = 1, line: Line | None = None) -> None:
        self.tickets: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._work, self._line = work, line
        self.threads = [
            # daemon: a request that hangs in the user's code must not keep the process alive
            threading.Thread(target=self._run, name=f"penstock-infer-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self) -> None:
        with nullcontext() if self._line is None else self._line.working():
            while (ticket := self.tickets.get()) is not None:
                self._work(ticket)
                del ticket  # else the last request lives as long as the thread waits

    def end(self, deadline: float) -> None:
        """Let the threads finish what is there, and wait for them, until a moment of the monotonic clock."""
        for _ in self.threads:
            self.tickets.put(None)
        for thread in self.threads:
            left = deadline - time.monotonic()
            thread.join(None if math.isinf(left) else max(0.0, left))


class Works:
    """The threads of one pipeline.

    Args:
        lines: the stages.
        preprocess: from a request to what the first stage is called with.
        postprocess: from what the last one returns to the result.
        depth: how many requests are in flight at most.
        workers: threads that preprocess, and as many that postprocess.
    """

    def __init__(
        self, lines: Sequence[Line], *, preprocess: Callable[[Any], Any] | None,
        postprocess: Callable[[Any], Any] | None, depth: int, workers: int,
    ) -> None:  # fmt: skip
        self._lines, self._preprocess, self._postprocess = lines, preprocess, postprocess
        self._is_apart = any(line.streams is not None for line in lines)
        self._lock, self._is_closed, self._count = threading.Lock(), False, 0
        self._free: SimpleQueue[RequestSlot | None] = SimpleQueue()  # None: closed
        for _ in range(depth):
            self._free.put(RequestSlot())
        self._before = _Part("preprocess", self._prepare, count=workers)
        self._stages = [
            _Part(f"stage-{at}", lambda ticket, at=at: self._compute(ticket, at), line=line)  # type: ignore[misc]
            for at, line in enumerate(lines)
        ]
        self._after = _Part("postprocess", self._finish, count=workers)
        self._parts = [self._before, *self._stages, self._after]

    def submit(self, request: object) -> Future[Any]:
        """Take a request; waits while as many are in flight as may be.

        Raises:
            UsageError: when the pipeline is closed.
        """
        seat = self._free.get()
        with self._lock:
            if seat is None or self._is_closed:
                self._free.put(None)  # for the next one who waits
                raise UsageError(CLOSED)
            ticket = _Ticket(self._count, Future(), request, _made_on_gpu(request) if self._is_apart else None, seat)
            self._count += 1
            self._before.tickets.put(ticket)
        return ticket.future

    def close(self, *, timeout: float = math.inf) -> None:
        """Cancel what has not begun, finish what has, and end all threads; wait for them for some seconds at most."""
        if self._is_own_thread():
            raise UsageError("close: called by a thread of the pipeline itself, which would wait for its own end")
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        while True:
            try:
                ticket = self._before.tickets.get_nowait()
            except Empty:
                break
            if ticket is not None:
                ticket.future.cancel()
                ticket.future.set_running_or_notify_cancel()  # tells those who wait for it
        self._free.put(None)
        deadline = time.monotonic() + timeout
        for part in self._parts:
            part.end(deadline)

    def let_go(self) -> None:
        """Close it, from whatever thread: when nobody holds it, or when the process ends.

        Nothing is under way then, or the process ends and what hangs in the user's code must not keep it.
        """
        if self._is_own_thread():
            threading.Thread(target=self.close, name="penstock-infer-close", daemon=True).start()
        else:
            self.close(timeout=_SECONDS_AT_EXIT)

    def _is_own_thread(self) -> bool:
        return any(threading.current_thread() in part.threads for part in self._parts)

    # ---- the way of a request

    def _prepare(self, ticket: _Ticket) -> None:
        if not ticket.future.set_running_or_notify_cancel():
            self._free.put(ticket.seat)
            return
        request, ticket.request = ticket.request, None
        with _Guard(ticket, "preprocess"):
            if ticket.made is not None:
                event, device = ticket.made
                kind_of(device).wait_event(device, event)
            thing = request if self._preprocess is None else self._preprocess(request)
            parcel = Parcel.of(arguments(thing), is_apart=self._is_apart)
            first = self._lines[0].streams
            if first is not None:
                ticket.kept, ticket.stream = parcel.tensors, first.copies
                brought, arrived = ticket.seat.bring(parcel.tensors, first)
                parcel = replace(parcel, tensors=brought, ready=arrived)
            ticket.parcel = parcel
        self._pass_on(ticket, self._stages[0])

    def _compute(self, ticket: _Ticket, at: int) -> None:
        line, is_last = self._lines[at], at == len(self._lines) - 1
        with _Guard(ticket, f"stage {at}" if len(self._lines) > 1 else "the model"):
            assert ticket.parcel is not None
            if line.streams is not None:
                ticket.stream = line.streams.compute
            # what came stays until the end of the request: a GPU may still read it
            ticket.kept = [*ticket.kept, *ticket.parcel.tensors]
            made = ticket.parcel = line(ticket.parcel, is_last=is_last, is_apart=self._is_apart)
            if is_last and made.ready is not None and line.out is not None:
                ticket.stream = line.out
                ticket.seat.take([tensor for tensor in made.tensors if tensor.is_cuda], made.ready, line.out)
        self._pass_on(ticket, self._after if is_last else self._stages[at + 1])

    def _pass_on(self, ticket: _Ticket, part: _Part) -> None:
        (part if ticket.error is None else self._after).tickets.put(ticket)

    def _finish(self, ticket: _Ticket) -> None:
        result: Any = None
        with _Guard(ticket, "the copy to the host"):
            if ticket.error is not None and ticket.stream is not None:
                ticket.seat.mark(ticket.stream)  # what was launched before it failed
            ticket.seat.wait()
            if ticket.error is None:
                assert ticket.parcel is not None
                result = self._taken(ticket.seat, ticket.parcel)
        if ticket.error is None and self._postprocess is not None:
            with _Guard(ticket, "postprocess"):
                result = self._postprocess(result)
        ticket.parcel, ticket.kept = None, ()
        future, error, seat = ticket.future, ticket.error, ticket.seat
        ticket.error = None
        self._free.put(seat)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    @staticmethod
    def _taken(seat: RequestSlot, parcel: Parcel) -> Any:  # noqa: ANN401 - whatever the last stage returned
        """Return what the last stage returned, in host memory."""
        on_gpu = [tensor.is_cuda for tensor in parcel.tensors]
        taken = iter(seat.taken(sum(on_gpu)))
        return parcel.open(
            [next(taken) if is_taken else tensor for tensor, is_taken in zip(parcel.tensors, on_gpu, strict=True)]
        )


class _Guard:
    """Lets an error belong to its request, with a note of where it happened."""

    def __init__(self, ticket: _Ticket, place: str) -> None:
        self._ticket, self._place = ticket, place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is not None and self._ticket.error is None:
            error.add_note(f"in {self._place}, for request {self._ticket.number} of an inference pipeline")
            self._ticket.error = error
        return error is not None


def _made_on_gpu(request: object) -> tuple[Event, torch.device] | None:
    """Return an event behind what makes a request that lies on a GPU, and which GPU that is."""
    args, kwargs = arguments(request)
    on_gpu = (part for part in (*args, *kwargs.values()) if isinstance(part, torch.Tensor) and part.is_cuda)
    found = next(on_gpu, None)
    return None if found is None else (current_stream(found.device).record_event(), found.device)
