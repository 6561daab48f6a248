"""Process lanes: lanes that are processes, started by torchrun, and their heartbeats before the first step."""

from __future__ import annotations

import atexit
import mmap
import os
import platform
import socket
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from penstock.devices.streams import Streams, make_streams, ordered_step
from penstock.errors import HangError, LostError, UsageError
from penstock.runtime.exclusive_use import ExclusiveUse
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.control_plane import ProcessControl
from penstock.runtime.lanes.hang_report import stack_file, stack_of_process, state_of
from penstock.runtime.lanes.shared_values import ProcessValues
from penstock.runtime.lanes.status_board import NUM_COLUMNS, StatusBoard, explain_wait
from penstock.runtime.step import Step
from penstock.runtime.wire.process_transport import BEAT, BOARD, LAST_BEAT, ProcessTransport
from penstock.runtime.wire.rendezvous import join_processes
from penstock.runtime.wire.shared_memory import SharedMemory, is_available
from penstock.runtime.wire.sockets import Links, Store
from penstock.runtime.wire.torch_p2p import TorchP2P

_NUMBER = count()  # numbers the pipelines; all processes make them in the same order
_EVERY_SECONDS = 1.0
_STOPPED_SECONDS, _SILENT_SECONDS = 10.0, 60.0  # the longest that a lane may be stopped, or send no heartbeat
_SAY_FIRST_SECONDS, _SAY_SECONDS = 15.0, 30.0


class ProcessLanes:
    """This process's lane, and its links to the other lanes."""

    def __init__(self, devices: Sequence[torch.device], *, timeout_seconds: float, transport: str) -> None:
        _join(timeout_seconds)
        self.lane, self.num_lanes = dist.get_rank(), dist.get_world_size()
        if self.num_lanes != len(devices):
            raise UsageError(f"lanes: {len(devices)}, but there are {self.num_lanes} processes, and each is a lane")
        self._timeout_seconds = timeout_seconds
        store = Store(dist.distributed_c10d._get_default_store(), f"penstock/{next(_NUMBER)}")
        hosts, address = _hosts(store, self.lane, self.num_lanes)
        self._links = Links(self.lane, self.num_lanes, store=store, hosts=hosts, address=address)
        self._device = device = devices[self.lane]
        self.streams: Mapping[int, Streams] = {}
        backend = _choose(transport, devices, is_one_machine=len(set(hosts)) == 1)
        self._transport = ProcessTransport(
            self._links, device=device, timeout_seconds=timeout_seconds,
            carrier=SharedMemory() if backend is None else TorchP2P(backend, device), on_hang=self._hang,
        )  # fmt: skip
        self._board = self._make_board(is_one_machine=len(set(hosts)) == 1)
        self.lanes = (self.lane,)
        self.transports = {self.lane: self._transport}
        self.rows = {self.lane: self._board.row(self.lane)}
        self._executor: Executor | None = None
        self.control = ProcessControl(self._transport)
        self.values = ProcessValues(self._transport, self.control)
        self._is_closed, self._use = False, ExclusiveUse()
        self._heartbeats = Heartbeats(self._transport, self._board)
        self._transport.on_wait = self._heartbeats.look  # until the first step
        atexit.register(self.close)

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:  # noqa: ARG002 - one lane runs here
        """Make the lane's streams."""
        self._heartbeats.stop()  # from now on, nothing takes long enough to need heartbeats
        self.streams = make_streams({self.lane: self._device})
        self._transport.streams = self.streams[self.lane]

    def set_timeout(self, seconds: float) -> None:
        """Set the longest time that a lane waits for a value."""
        self._timeout_seconds = self._transport.timeout_seconds = seconds

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run this lane's part of a step; if one lane fails, all lanes raise."""
        (executor,) = executors
        self._executor, self._transport.on_wait = executor, None
        self.control.begin(step)
        with self.control.coordinated():
            self.control.start(step)
            self.control.begin_comparison(step)
            with ordered_step(self.streams):
                executor.run(step, None if spans is None else spans[0])

    def _hang(self, from_lane: int, what: str) -> HangError:
        doing, hanging_lane = "not ready", from_lane
        if self._executor is not None:
            doing, hanging_lane = explain_wait(
                self._board, from_lane, finder=self.lane, program_of=self._executor.program_of
            )
        process, file = self._board.process(hanging_lane)
        state = state_of(process)
        error = HangError(
            f"lane {self.lane} has waited {self._timeout_seconds:g} s {what} is {doing}"
            + (f"; {state}" if state else "")
        )
        stack = stack_of_process(process, file)
        if stack:
            error.add_note(f"lane {hanging_lane}: {stack}")
        return error

    # ---- beginning and end

    def _make_board(self, *, is_one_machine: bool) -> StatusBoard:
        """Return a board that all processes share if they run on one machine; otherwise each sees only its own row."""
        if not (is_one_machine and is_available()):
            return StatusBoard.empty(self.num_lanes)
        size = self.num_lanes * NUM_COLUMNS * 8
        if self.lane == 0:
            descriptor = os.memfd_create("penstock-board")
            os.ftruncate(descriptor, size)
            for other in self._links.peers:
                self._links.send(other, BOARD, b"", (descriptor,))
        else:
            self._transport.receive_message(0, "board")
            descriptor = self._links.descriptor(0)
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        board = StatusBoard(np.frombuffer(memory, dtype=np.int64).reshape(self.num_lanes, NUM_COLUMNS))
        board.rows[self.lane] = -1
        board.introduce(self.lane, os.getpid(), stack_file())
        return board

    def close(self) -> None:
        """Send a goodbye to the other processes; torch.distributed stays initialized for the next pipeline."""
        if self._is_closed or not self._use.is_here:  # a fork must not send the goodbye of its parent
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._heartbeats.stop()
        self._transport.close()


def _join(timeout_seconds: float) -> None:
    """Join the processes of torchrun, unless the user's script has done so; leave them when this process ends."""
    if dist.is_initialized():
        return
    join_processes(timeout_seconds)
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _hosts(store: Store, lane: int, num_lanes: int) -> tuple[list[str], str]:
    """Return a name for the machine of each process, and this machine's address."""
    boot = "/proc/sys/kernel/random/boot_id"
    own = f"{platform.node()} {_first_line(boot) or uuid.getnode()}"
    store.set(f"host/{lane}", own)
    hosts = [store.get(f"host/{other}") for other in range(num_lanes)]
    if len(set(hosts)) == 1:
        return hosts, "127.0.0.1"
    return hosts, socket.gethostbyname(socket.gethostname())


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _choose(transport: str, devices: Sequence[torch.device], *, is_one_machine: bool) -> str | None:
    """Return the backend that moves values, or None for shared memory; refuse a transport that cannot work here."""
    can_share = is_one_machine and is_available()
    on_gpus = all(device.type == "cuda" for device in devices)
    has_own_gpus = on_gpus and len({(device.index) for device in devices}) == len(devices)
    if transport == "shared" and not can_share:
        raise UsageError("transport: the processes cannot share memory: they are on several machines, or not on Linux")
    if transport == "nccl" and not has_own_gpus:
        raise UsageError("transport: nccl needs a GPU of its own for each process")
    if transport == "auto":
        if has_own_gpus and dist.is_nccl_available():
            return "nccl"
        return None if can_share else "gloo"
    return None if transport == "shared" else transport


class Heartbeats:
    """The heartbeats that this process sends until `stop`, and those of the lanes that it waits for.

    Before the first step, no timeout fits: a lane may measure for minutes. So every process sends a heartbeat each
    second. If a process sends no more of them, or is stopped, the waiting processes raise an error that names it, long
    before their timeout.
    """

    def __init__(self, transport: ProcessTransport, board: StatusBoard) -> None:
        self._transport, self._board, self._lane = transport, board, transport.lane
        self._begin()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="penstock-signs", daemon=True)
        self._thread.start()

    def _begin(self, lane: int = -1) -> None:
        """Begin a wait for a lane. All times are seconds since the start of this wait."""
        self._awaited, self._seconds = lane, 0.0
        self._num_beats, self._beat_at = 0, 0.0
        self._stopped_at: float | None = None
        self._said_at = _SAY_FIRST_SECONDS - _SAY_SECONDS

    def _beat(self) -> None:
        while not self._is_over.wait(_EVERY_SECONDS):
            self._tell(b"")

    def _tell(self, body: bytes) -> None:
        for other in self._transport.links.peers:
            with suppress(LostError):
                self._transport.links.send(other, BEAT, body)

    def stop(self) -> None:
        """Send the last heartbeat, after which the other processes expect no more."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            self._tell(LAST_BEAT)

    def look(self, lane: int, seconds: float) -> None:
        """Raise if a lane for which this process has waited for `seconds` is stopped, or sends no more heartbeats."""
        if lane != self._awaited or seconds < self._seconds:
            self._begin(lane)
        self._seconds = seconds
        num_beats, state = self._transport.num_beats[lane], state_of(self._board.process(lane)[0])
        if num_beats != self._num_beats:
            self._num_beats, self._beat_at = num_beats, seconds
        if " is stopped " not in state:
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = seconds
        own = "captures the model" if lane else "captures, measures and cuts the model"
        doing = own if num_beats else "is not ready"
        silent = seconds - self._beat_at if num_beats else 0.0
        stopped = 0.0 if self._stopped_at is None else seconds - self._stopped_at
        if stopped >= _STOPPED_SECONDS or silent >= _SILENT_SECONDS:
            raise HangError(
                f"lane {self._lane} has waited {seconds:.0f} s for lane {lane}, which {doing}, and has sent no "
                f"heartbeat for {max(silent, stopped):.0f} s" + (f"; {state}" if state else "")
            )
        self._say(lane, doing)

    def _say(self, lane: int, doing: str) -> None:
        """Report on stderr, from time to time, that lanes wait; only one of the waiting lanes does this."""
        if self._lane == (1 if lane == 0 else 0) and self._seconds >= self._said_at + _SAY_SECONDS:
            self._said_at = self._seconds
            sys.stderr.write(f"lane {self._lane} has waited {self._seconds:.0f} s for lane {lane}, which {doing}\n")
            sys.stderr.flush()
