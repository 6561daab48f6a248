"""ProcessCompany: each lane a process, as torchrun starts them; what they decide and share together."""

from __future__ import annotations

import atexit
import mmap
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.devices.streams import Streams, joined, make_streams
from penstock.errors import HangError, LostError, PenstockError, UsageError, error_in_short
from penstock.runtime.exclusive_use import Use
from penstock.runtime.executor import Executor, Spans
from penstock.runtime.lanes.hang_report import stack_file, stack_of_process, state_of
from penstock.runtime.lanes.liveness import Signs
from penstock.runtime.lanes.status_board import NUM_COLUMNS, StatusBoard, follow
from penstock.runtime.step import Step
from penstock.runtime.wire import shared_memory as segments
from penstock.runtime.wire.batch_digests import Digest, differences
from penstock.runtime.wire.process_transport import BOARD, PING, DistributedTransport
from penstock.runtime.wire.rendezvous import meet
from penstock.runtime.wire.sockets import Links, Store
from penstock.runtime.wire.torch_p2p import PointToPoint
from penstock.runtime.wire.transport import Key
from penstock.schedule.schedule import Schedule

__all__ = ["ProcessLanes"]

_NUMBER = count()  # pipelines of this process: all processes make theirs in the same order
_PINGS = 8
_COMPARED_FIRST, _COMPARED_EVERY = 3, 50  # calls whose batches are compared: the first of each kind, then some
_SAME = (
    "Every process must be given the same batches in the same order, for each lane uses its part of all of them: take "
    "no DistributedSampler, and shuffle by the same seed in all processes (docs/howto/processes.md)"
)


class ProcessLanes:
    """The lane that is this process, and its links to the others.

    Args:
        devices: of each lane.
        timeout_seconds: the longest a lane waits for a value.
        transport: "auto", "shared", "gloo" or "nccl".
    """

    def __init__(self, devices: Sequence[torch.device], *, timeout_seconds: float, transport: str) -> None:
        _join(timeout_seconds)
        self.lane, self.num_lanes = dist.get_rank(), dist.get_world_size()
        if self.num_lanes != len(devices):
            raise UsageError(f"there are {self.num_lanes} processes, each a lane; lanes asked for: {len(devices)}")
        self._timeout_seconds = timeout_seconds
        store = Store(dist.distributed_c10d._get_default_store(), f"penstock/{next(_NUMBER)}")
        hosts, address = _hosts(store, self.lane, self.num_lanes)
        self._links = Links(self.lane, self.num_lanes, store=store, hosts=hosts, address=address)
        self._device = device = devices[self.lane]
        self.streams: Mapping[int, Streams] = {}
        by_torch = _choose(transport, devices, is_one_machine=len(set(hosts)) == 1)
        self._transport = DistributedTransport(
            self._links, device=device, timeout_seconds=timeout_seconds,
            by_torch=None if by_torch is None else PointToPoint(by_torch, device), on_hang=self._hang,
        )  # fmt: skip
        self._board = self._make_board(is_one_machine=len(set(hosts)) == 1)
        self.lanes = (self.lane,)
        self.transports = {self.lane: self._transport}
        self.rows = {self.lane: self._board.row(self.lane)}
        self._executor: Executor | None = None
        self._told: dict[str, int] = {}
        self._has_failed = False
        self._digests: dict[int, Digest] = {}  # by step: of batches that are still to be compared
        self._num_ended: dict[tuple[bool, bool], int] = {}  # calls of each kind that came to their end
        self._at_hand = (0, (False, False))  # the number and the kind of the last
        self._is_closed, self._use = False, Use()
        self._signs = Signs(self._transport, self._board)
        self._transport.on_look = self._signs.look  # until the first step
        atexit.register(self.close)

    def give_streams(self, groups: Sequence[Sequence[int]]) -> None:  # noqa: ARG002 - one lane runs here
        """Make the lane's streams."""
        self._signs.stop()  # from now on nothing takes long
        self.streams = make_streams({self.lane: self._device})
        self._transport.streams = self.streams.get(self.lane)

    # ---- a step

    def wait_at_most(self, seconds: float) -> None:
        """Let lanes wait so long for a value, and no longer."""
        self._timeout_seconds = self._transport.timeout_seconds = seconds

    def run(self, executors: Sequence[Executor], step: Step, spans: Sequence[Spans] | None) -> None:
        """Run this lane's part of a step; when one lane fails, all raise."""
        (executor,) = executors
        self._executor, self._transport.on_look = executor, None
        self._go_on(step)
        with self._telling():
            self._transport.start(step.number, sum(step.batch.sizes))
            self._transport.check()  # a lane that refused the step may have left since
            self._look_at_batch(step)
            with joined(self.streams.values()):
                executor.run(step, None if spans is None else spans[0])

    def _go_on(self, step: Step) -> None:
        if self._has_failed:  # lanes may have stopped in different steps: go on from the latest
            self._transport.recover()
            step.number = max(self.gather(step.number))
            self._has_failed = False
            self._digests.clear()
            self._num_ended.clear()

    def agree(self, step: Step, what: str, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what each process gave before, or in, a step; who refuses the step, or fails, is heard of."""
        self._go_on(step)
        with self._telling():
            self._transport.start(step.number, sum(step.batch.sizes))
            self._transport.check()
            name = f"{what} {step.number}"
            for other in self._links.peers:
                self._transport.tell(other, name, thing)
            return [thing if lane == self.lane else self._transport.hear(lane, name) for lane in range(self.num_lanes)]

    def refuse(self, step: int, error: BaseException) -> None:
        """Tell the others that this process does not begin a step."""
        self._transport.refuse(step, error)

    def fail(self, error: BaseException) -> None:
        """Tell the others of what ends this process outside of a step; may be called by any thread."""
        self._has_failed = True
        self._transport.abort(error)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Do something with the others; where it fails here, tell them, and agree on a new start before the next."""
        try:
            yield
        except BaseException as error:
            # after a refusal all have come as far: none of them ran the step
            self._has_failed = self._has_failed or not getattr(error, "was_refused", False)
            self._digests.pop(self._at_hand[0], None)  # whoever refused has none
            if not getattr(error, "was_told", False):
                self._transport.abort(error)
            raise

    # Batches are compared at the end of a call, when all lanes have begun it: nobody waits for a digest. That of
    # tensors on a GPU is told only then, so after the first calls it is compared at the end of the next.

    def _look_at_batch(self, step: Step) -> None:
        """Begin to look at a batch, if it is time to; tell the others what it looks like, if that is known at once."""
        kind = (step.mode.is_training, step.mode.has_backward)
        self._at_hand = (step.number, kind)
        is_capture = step.tapes is not None and not all(tape.is_replay for tape in step.tapes.values())
        is_due = self._num_ended.get(kind, 0) < _COMPARED_FIRST or step.number % _COMPARED_EVERY == 0
        if step.given and is_due and not is_capture:
            digest = self._digests[step.number] = Digest(step.given, step.number)
            if digest.is_ready:
                self._tell_digest(step.number, digest)

    def _tell_digest(self, number: int, digest: Digest) -> None:
        try:
            for other in self._links.peers:
                self._transport.tell(other, f"batch {number}", digest.rows())
        except LostError:
            self._transport.check()  # it may have said why, before it left
            raise

    def _compare_batches(self) -> list[str]:
        """End a call: return how batches of the processes differ, as far as it is known by now; nothing if they do not.

        All processes come to the same answer at the end of the same call.
        """
        now, kind = self._at_hand
        latest = self._digests.get(now)
        if latest is not None and not latest.is_ready:
            self._tell_digest(now, latest)
        ended = self._num_ended[kind] = self._num_ended.get(kind, 0) + 1
        found: list[str] = []
        for number in [number for number in self._digests if number < now or ended <= _COMPARED_FIRST]:
            own = self._digests.pop(number).rows()
            everyone = [
                own if lane == self.lane else self._transport.hear(lane, f"batch {number}")
                for lane in range(self.num_lanes)
            ]
            found += [f"in call {number} {told}" for told in differences(everyone)]
        return found

    def _end_call(self) -> None:
        """Raise where the batches of the processes differ: all of them do."""
        with self._telling():
            found = self._compare_batches()
        if found:
            raise UsageError(f"the processes were given different batches: {'; '.join(found)}. {_SAME}")

    def _hang(self, from_lane: int, what: str) -> HangError:
        doing, culprit = "not ready", from_lane
        if self._executor is not None:
            doing, culprit = follow(self._board, from_lane, finder=self.lane, program_of=self._executor.program_of)
        process, file = self._board.process(culprit)
        state = state_of(process)
        error = HangError(
            f"lane {self.lane} has waited {self._timeout_seconds:g} s {what} is {doing}"
            + (f"; {state}" if state else "")
        )
        stack = stack_of_process(process, file)
        if stack:
            error.add_note(f"lane {culprit}: {stack}")
        return error

    # ---- together

    def decide(self, choose: Callable[[], dict[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
        """Compare the settings of all processes; let the first choose for all.

        Raises:
            UsageError: listing the settings that differ.
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
        if self.lane == 0:
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

    def gather(self, thing: Any) -> list[Any]:  # noqa: ANN401 - whatever JSON can hold
        """Return what each process gave, in the order of their lanes."""
        name = self._next("gather")
        for other in self._links.peers:
            self._transport.tell(other, name, thing)
        return [thing if lane == self.lane else self._transport.hear(lane, name) for lane in range(self.num_lanes)]

    def _next(self, what: str) -> str:
        self._told[what] = self._told.get(what, 0) + 1
        return f"{what} {self._told[what]}"

    def exchange(self, number: int, tensors: Sequence[Any], lanes: Sequence[int]) -> list[list[Any]]:
        """Return what each of some lanes gave, in order; called by all of them under the same number."""
        plain = [thing.detach() if isinstance(thing, torch.Tensor) else thing for thing in tensors]
        with self._telling():
            for lane in lanes:
                if lane != self.lane:
                    self._transport.send(Key("R", self.lane, number, 0), lane, plain)
            return [
                list(plain) if lane == self.lane else list(self._transport.receive(Key("R", lane, number, 0), lane))
                for lane in lanes
            ]

    def share_losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:
        """Return the loss of every micro-batch: the lanes that end the model tell all others."""
        with self._telling():
            losses = self._share_losses(step, schedule)
        self._end_call()
        return losses

    def _share_losses(self, step: Step, schedule: Schedule) -> Mapping[int, torch.Tensor]:
        ends = sorted({schedule.home(schedule.num_stages - 1, mb) for mb in range(step.batch.num_mbs)})
        name = f"losses {step.number}"
        if self.lane in ends:
            told = {
                mb: [
                    float(loss),
                    str(loss.dtype).removeprefix("torch."),
                    {name: float(value) for name, value in step.metrics.get(mb, {}).items()},
                ]
                for mb, loss in step.losses.items()
            }
            for other in self._links.peers:
                self._transport.tell(other, name, told)
        found = dict(step.losses)
        for lane in ends:
            if lane != self.lane:
                for mb, (loss, dtype, metrics) in self._transport.hear(lane, name).items():
                    found[int(mb)] = torch.tensor(loss, dtype=getattr(torch, dtype))
                    step.metrics[int(mb)] = {
                        key: torch.tensor(value, dtype=torch.float64) for key, value in metrics.items()
                    }
        return found

    def share_outputs(
        self, outputs: Mapping[int, list[Any]], num_mbs: int, schedule: Schedule, *, to_all: bool
    ) -> Mapping[int, list[Any]] | None:
        """Return the results of every micro-batch: of those that end on several lanes, all get all."""
        with self._telling():
            found = self._share_outputs(outputs, num_mbs, schedule, to_all=to_all)
        self._end_call()
        return found

    def _share_outputs(
        self, outputs: Mapping[int, list[Any]], num_mbs: int, schedule: Schedule, *, to_all: bool
    ) -> Mapping[int, list[Any]] | None:
        lane_of = {mb: schedule.home(schedule.num_stages - 1, mb) for mb in range(num_mbs)}
        ends = set(lane_of.values())
        wanted_by = set(range(self.num_lanes)) if to_all else ends
        found = dict(outputs)
        for mb, values in outputs.items():
            for other in wanted_by - {self.lane}:
                self._transport.send(Key("R", lane_of[mb], schedule.num_stages, mb), other, values)
        if self.lane not in wanted_by:
            return None
        for mb, lane in lane_of.items():
            if mb not in found:
                received = self._transport.receive(Key("R", lane, schedule.num_stages, mb), lane)
                found[mb] = [value.clone() for value in received]  # the user may keep them for long
        return found

    def clock_offset(self) -> float:
        """Return what to add to this process's clock to get lane 0's: half of the quickest way there and back.

        All processes call it; lane 0 answers the others, one after the other.
        """
        if self.lane == 0:
            for other in range(1, self.num_lanes):
                self._transport.hear(other, self._name_of_clock(other))
            return 0.0
        best = (float("inf"), 0.0)
        for _ in range(_PINGS):
            self._links.send(0, PING, f"{time.monotonic_ns()},".encode())
            sent, theirs, back = self._transport.hear(0, "pong")
            best = min(best, (back - sent, theirs - (sent + back) / 2))
        self._transport.tell(0, self._name_of_clock(self.lane), True)
        return best[1] / 1e9

    def _name_of_clock(self, lane: int) -> str:
        return self._next(f"clock of {lane}")

    # ---- beginning and end

    def _make_board(self, *, is_one_machine: bool) -> StatusBoard:
        """Return a board that all processes of this machine see; between machines each sees its own row only."""
        if not (is_one_machine and segments.are_there()):
            return StatusBoard.empty(self.num_lanes)
        size = self.num_lanes * NUM_COLUMNS * 8
        if self.lane == 0:
            descriptor = os.memfd_create("penstock-board")
            os.ftruncate(descriptor, size)
            for other in self._links.peers:
                self._links.send(other, BOARD, b"", (descriptor,))
        else:
            self._transport.hear(0, "board")
            descriptor = self._links.descriptor(0)
        memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        board = StatusBoard(np.frombuffer(memory, dtype=np.int64).reshape(self.num_lanes, NUM_COLUMNS))
        board.rows[self.lane] = -1
        board.introduce(self.lane, os.getpid(), stack_file())
        return board

    def close(self) -> None:
        """Say goodbye to the others; torch.distributed stays joined, for the next pipeline."""
        if self._is_closed or not self._use.is_here:  # a fork of this process says goodbye for itself only
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._signs.stop()
        self._transport.close()


def _join(timeout_seconds: float) -> None:
    """Join the processes that torchrun started, unless the user's script has; left again when the process ends."""
    if dist.is_initialized():
        return
    meet(timeout_seconds)
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
    """Return the backend that moves values, or None for shared memory.

    Raises:
        UsageError: when the one that was asked for cannot work here.
    """
    can_share = is_one_machine and segments.are_there()
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
