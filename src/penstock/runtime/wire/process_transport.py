"""Process transport: messages between lanes that are processes; a value carrier moves large values."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.devices.streams import Event, HostStreams, Streams, Workspace
from penstock.errors import HangError, LaneError, LostError
from penstock.runtime.wire.messages import HEAD, INLINE, Description, Head, SentDescriptions
from penstock.runtime.wire.sockets import Frame, Links
from penstock.runtime.wire.transport import Key, Payload, ValueCarrier

# frame types
DATA, DESCRIPTION, INTRODUCTION, JSON, ABORT, REFUSAL, GOODBYE, PING, PONG, BOARD, BEAT = range(11)

LAST_BEAT = b"."

HEAD_OF_DESCRIPTION = struct.Struct("<I")  # the number of the description

_INLINE_BYTES = 1 << 14  # smaller values travel with their head
_POLL_SECONDS = 1.0
_LISTEN_SECONDS = 0.2
_GOODBYE_SECONDS = 2.0
_MAX_COUNTED_SECONDS = 2.0  # at most, between two checks: a process that was stopped did not wait meanwhile
_REMEMBERED_STEPS = 64


class _Message(NamedTuple):
    """A message whose values the carrier sends."""

    key: Key
    step: int
    num_samples: int
    to_lane: int
    payload: Payload
    number: int
    description: Description
    ready: Event | None  # on a GPU: the event after the work that makes the values


class ProcessTransport:
    """One process's end of the transport: it sends to the other processes, and keeps the messages that have arrived.

    Args:
        links: the sockets to the other processes.
        device: the device of the lane.
        timeout_seconds: the longest time that the lane waits.
        carrier: moves values that are too large to travel with their head.
        on_hang: returns the error for a wait that took too long, given the awaited lane and a text about the wait.
    """

    def __init__(
        self, links: Links, *, device: torch.device, timeout_seconds: float, carrier: ValueCarrier,
        on_hang: Callable[[int, str], HangError],
    ) -> None:  # fmt: skip
        self.links, self.device, self.timeout_seconds = links, device, timeout_seconds
        self.lane = links.lane
        self.streams: Streams = HostStreams(device)  # the lane's own
        self._carrier, self._on_hang = carrier, on_hang
        self._known = {other: SentDescriptions() for other in links.peers}
        self._descriptions: dict[tuple[int, int], Description] = {}
        self._arrived: dict[tuple[int, Key], Any] = {}
        self._seen: set[tuple[int, Key]] = set()  # of the last steps; a message that arrives twice is ignored
        self._messages: dict[tuple[int, str], Any] = {}
        self._step = self._num_samples = 0
        self.num_beats = dict.fromkeys(links.peers, 0)  # heartbeats from each lane; 0 again after its last one
        self.on_wait: Callable[[int, float], None] | None = None  # called with the awaited lane and the seconds so far
        self._refusals: dict[int, str] = {}  # by step
        self._failure: tuple[int, int, str, str] | None = None  # lane, step, type, message
        self._sender: _Sender | None = None
        self._news = threading.Condition()
        self._reader: _Reader | None = None
        if carrier.needs_reader:
            self._reader = _Reader(self._listen)

    # ---- values

    def start(self, step: int, num_samples: int) -> None:
        """Begin a step with a batch of `num_samples` samples; discard the messages of earlier steps."""
        self._step, self._num_samples = step, num_samples
        self._refusals = {number: told for number, told in self._refusals.items() if number >= step}
        with self._news:
            for name in [name for name in self._arrived if name[0] < step]:
                del self._arrived[name]
            if step % _REMEMBERED_STEPS == 0:
                self._seen = {name for name in self._seen if name[0] >= step - _REMEMBERED_STEPS}

    def send(self, key: Key, to_lane: int, payload: Payload) -> None:
        """Send values to a lane; a separate thread copies large values while the lane computes."""
        try:
            self._send(key, to_lane, payload)
        except LostError:
            self._wait_for_reason()
            raise

    def _send(self, key: Key, to_lane: int, payload: Payload) -> None:
        number, description, is_new = self._known[to_lane].number(payload)
        if is_new:
            self._post(to_lane, DESCRIPTION, HEAD_OF_DESCRIPTION.pack(number) + description.to_json())
        size = description.num_bytes
        ready = self.streams.mark()
        message = _Message(key, self._step, self._num_samples, to_lane, payload, number, description, ready)
        if size <= _INLINE_BYTES:
            head = Head(self._step, self._num_samples, key, number, INLINE, size)
            self._post(to_lane, DATA, head.pack() + description.to_bytes(payload))
        elif size < self._carrier.threaded_bytes:
            self._carry(message)
        else:  # one thread sends all of these, so that they stay in order
            if self._sender is None:
                self._sender = _Sender(self._carry)
            self._sender.put(message)

    def _carry(self, message: _Message) -> None:
        """Send a message's values through the carrier."""
        to_lane = message.to_lane

        def announce(number: int, body: bytes) -> None:
            size = message.description.num_bytes
            head = Head(message.step, message.num_samples, message.key, message.number, number, size)
            self._post(to_lane, DATA, head.pack() + body)

        self._carrier.send(
            to_lane, message.description, message.payload, announce=announce,
            introduce=lambda body, descriptors: self._post(to_lane, INTRODUCTION, body, descriptors),
        )  # fmt: skip

    def _post(self, to_lane: int, kind: int, body: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> None:
        """Send a frame; if the socket is full, wait until the other lane reads, at most for the timeout.

        Both lanes may be sending. So this lane reads frames while it waits; otherwise neither could continue.
        """
        if self.links.send(to_lane, kind, body, descriptors):
            return
        if self._sender is not None and self._sender.is_here:  # if this fails, the lane itself notices
            self.links.drain(to_lane, self.timeout_seconds)
        else:
            self._wait(
                lambda: self.links.flush(to_lane), to_lane, f"to send to lane {to_lane}, which reads nothing: it"
            )

    def receive(self, key: Key, from_lane: int, into: Workspace | None = None) -> Payload:
        """Wait for values from a lane, and return them."""
        values = self._receive(key, from_lane)
        if into is None:
            return values
        return self.streams.bring(values, self.streams.mark(), into)

    def _receive(self, key: Key, from_lane: int) -> Payload:
        name = (self._step, key)
        if name not in self._arrived:
            self._wait(lambda: name in self._arrived, from_lane, f"for {key} from lane {from_lane}, which")
        head, body = self._arrived.pop(name)
        if head.num_samples != self._num_samples:
            raise LaneError(
                f"lane {self.lane} was given a batch of {self._num_samples} samples, lane {from_lane} one of "
                f"{head.num_samples}; give all processes the same batch"
            )
        description = self._descriptions[from_lane, head.description]
        if head.carrier == INLINE:
            return description.from_bytes(body, self.device)
        return description.read(self._carrier.receive(from_lane, head, body), self.device)

    # ---- small messages

    def send_message(self, to_lane: int, name: str, thing: Any) -> None:  # noqa: ANN401 - any JSON value
        """Send a small object to a lane, under a name."""
        self._post(to_lane, JSON, json.dumps([name, thing]).encode())

    def receive_message(self, from_lane: int, name: str) -> Any:  # noqa: ANN401 - any JSON value
        """Wait for the object that a lane sends under a name, and return it."""
        at = (from_lane, name)
        if at not in self._messages:
            self._wait(lambda: at in self._messages, from_lane, f"for {name} from lane {from_lane}, which")
        return self._messages.pop(at)

    def abort(self, error: BaseException) -> None:
        """Tell all other lanes that this lane failed."""
        self._tell_all(ABORT, json.dumps([self._step, type(error).__name__, str(error)]).encode())

    def _tell_all(self, kind: int, body: bytes) -> None:
        """Send a frame to all lanes that are still connected; do not wait for any of them."""
        for other, peer in self.links.peers.items():
            if peer.is_open:
                with contextlib.suppress(LostError):
                    self.links.send(other, kind, body)

    def refuse(self, step: int, error: BaseException) -> None:
        """Tell all other lanes that this lane will not run a step, because its batch is wrong."""
        self._tell_all(REFUSAL, json.dumps([step, str(error)]).encode())

    def recover(self) -> None:
        """Forget a failure that has been raised, so that the next step can run."""
        with self._news:
            self._failure = None
            self._arrived.clear()
        self._carrier.forget()

    # ---- reading

    def _wait(self, is_there: Callable[[], bool], from_lane: int, what: str) -> None:
        last = time.monotonic()
        end, patience, awake = last + self.timeout_seconds, _POLL_SECONDS, 0.0
        while not is_there():
            self._check()
            now = time.monotonic()
            if self.on_wait is not None:
                awake, last = awake + min(now - last, _MAX_COUNTED_SECONDS), now
                self.on_wait(from_lane, awake)
            if patience == _POLL_SECONDS and not self.links.peers[from_lane].is_open:
                # it may have left because of a failure; a report of that failure may still arrive here
                end, patience = min(end, now + _GOODBYE_SECONDS), _GOODBYE_SECONDS / 20
            if now >= end:
                if self.links.peers[from_lane].is_open:
                    raise self._on_hang(from_lane, what)
                raise LostError(f"lane {from_lane} has ended, and lane {self.lane} still waits for it")
            self._read(min(end - now, patience), is_there)

    def check(self) -> None:
        """Raise the failure that another lane reported, or a LostError if a lane is gone."""
        self._read(0.0)
        self._check()

    def _wait_for_reason(self) -> None:
        """After another lane has left, wait a moment for the failure that made it leave, and raise it.

        The report comes from the lane that failed, perhaps a third one, so it may arrive after the other lane has gone.
        """
        end = time.monotonic() + _GOODBYE_SECONDS
        while (left := end - time.monotonic()) > 0:
            self._read(min(left, _GOODBYE_SECONDS / 20))
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            _, step, name, message = self._failure
            self._failure = None
            kind = {"HangError": HangError, "LostError": LostError}.get(name, LaneError)
            error = kind(message if step == self._step else f"in step {step}, which this lane had finished: {message}")
            error.was_reported = True
            raise error
        if self._step in self._refusals:
            refused = LaneError(self._refusals.pop(self._step))
            refused.was_reported = refused.was_not_started = True
            raise refused
        gone = self.links.lost
        if gone:
            raise LostError(f"lane {gone[0]} is gone: its process ended without a message (killed, or out of memory?)")

    def _read(self, seconds: float, is_there: Callable[[], bool] | None = None) -> None:
        """Take the frames that arrive within `seconds`; with a reader thread, wait until that thread has taken some."""
        if self._reader is None:
            for frame in self.links.read(seconds):
                self._take(frame)
        elif seconds:
            seconds = min(seconds, _LISTEN_SECONDS / 10) if self.links.has_unsent else seconds
            with self._news:
                if is_there is None or not is_there():
                    self._news.wait(seconds)

    def _listen(self) -> None:
        """Take the frames that arrive within a moment; the reader thread calls this in a loop."""
        frames = self.links.read(_LISTEN_SECONDS)
        if frames or self.links.lost:
            with self._news:
                for frame in frames:
                    self._take(frame)
                self._news.notify_all()

    def _take(self, frame: Frame) -> None:
        _HANDLERS[frame.type](self, frame.peer, frame.body)

    def _take_data(self, peer: int, body: bytes) -> None:
        head = Head.unpack(body)
        name = (head.step, head.key)
        if name in self._seen:
            return
        if head.key.kind != "R":  # results and shared parameters may be sent several times between two steps
            self._seen.add(name)
        rest: Any = body[HEAD.size :]
        if head.carrier != INLINE:
            rest = self._carrier.arrived(peer, head, rest)
        if head.step >= self._step:
            self._arrived[name] = (head, rest)
        elif head.carrier != INLINE:  # it belongs to a failed step
            self._carrier.drop(peer, head, rest)

    def _take_description(self, peer: int, body: bytes) -> None:
        (number,) = HEAD_OF_DESCRIPTION.unpack_from(body)
        self._descriptions[peer, number] = Description.from_json(body[HEAD_OF_DESCRIPTION.size :])

    def _take_introduction(self, peer: int, body: bytes) -> None:
        self._carrier.introduced(peer, body, lambda: self.links.descriptor(peer))

    def _take_json(self, peer: int, body: bytes) -> None:
        name, thing = json.loads(body)
        self._messages[peer, name] = thing

    def _take_abort(self, peer: int, body: bytes) -> None:
        step, name, message = json.loads(body)
        self._failure = self._failure or (peer, step, name, message)

    def _take_refusal(self, peer: int, body: bytes) -> None:
        step, message = json.loads(body)
        self._refusals[step] = f"lane {peer} could not begin the step: {message}"

    def _take_goodbye(self, peer: int, _: bytes) -> None:
        self.links.peers[peer].said_goodbye = True

    def _take_board(self, peer: int, _: bytes) -> None:
        self._messages[peer, "board"] = True

    def _take_beat(self, peer: int, body: bytes) -> None:
        self.num_beats[peer] = 0 if body == LAST_BEAT else self.num_beats[peer] + 1

    def _take_ping(self, peer: int, body: bytes) -> None:
        self.links.send(peer, PONG, body + str(time.monotonic_ns()).encode())

    def _take_pong(self, peer: int, body: bytes) -> None:
        sent, theirs = body.split(b",")
        self._messages[peer, "pong"] = (int(sent), int(theirs), time.monotonic_ns())

    def close(self) -> None:
        """Send a goodbye to the other lanes, and close everything."""
        if self._sender is not None:
            self._sender.close()
        if self._reader is not None:
            self._reader.close()
        self._tell_all(GOODBYE, b"")
        for other, peer in self.links.peers.items():
            with contextlib.suppress(LostError):
                if peer.is_open and peer.unsent:
                    self.links.drain(other, _GOODBYE_SECONDS)
        self.links.close()
        self._carrier.close()


_HANDLERS: dict[int, Callable[[ProcessTransport, int, bytes], None]] = {
    DATA: ProcessTransport._take_data,
    DESCRIPTION: ProcessTransport._take_description,
    INTRODUCTION: ProcessTransport._take_introduction,
    JSON: ProcessTransport._take_json,
    ABORT: ProcessTransport._take_abort,
    REFUSAL: ProcessTransport._take_refusal,
    GOODBYE: ProcessTransport._take_goodbye,
    PING: ProcessTransport._take_ping,
    PONG: ProcessTransport._take_pong,
    BOARD: ProcessTransport._take_board,
    BEAT: ProcessTransport._take_beat,
}


class _Sender:
    """A thread that copies large values while the lane computes."""

    def __init__(self, send: Callable[[_Message], None]) -> None:
        self._tasks: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._send = send
        self._thread = threading.Thread(target=self._work, name="penstock-send", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def put(self, task: _Message) -> None:
        """Queue a message."""
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if task.ready is not None:  # this thread's stream is not ordered after the lane's
                    task.ready.synchronize()
                self._send(task)
            except LostError:
                continue  # the lane itself notices and reports it
            finally:
                del task

    def close(self) -> None:
        """End the thread after all messages have been sent."""
        self._tasks.put(None)
        self._thread.join(timeout=5.0)


class _Reader:
    """A thread that reads frames while the lane computes."""

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen, self._is_closed = listen, False
        self._thread = threading.Thread(target=self._work, name="penstock-read", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_closed:
            self._listen()

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._thread.join(timeout=5.0)
