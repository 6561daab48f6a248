"""Executor: runs the program of one lane, in a thread or a process; a transport moves the values between lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from penstock.devices.streams import Stamp, Streams, Workspace
from penstock.errors import LaneError, error_in_short
from penstock.model.source import line_of
from penstock.runtime.lane_program import Instruction, LaneProgram
from penstock.runtime.stage_run import Record, StageRun, dtype_hint
from penstock.runtime.step import Step, Watch, new_tensors
from penstock.runtime.weight_stash import WeightVersions
from penstock.runtime.wire.transport import Key, Stopped, Transport
from penstock.schedule.actions import Kind
from penstock.schedule.rules import Value

# the value that a stage holds for a micro-batch after an action
_HELD_AFTER = {Kind.F: Value.SAVED, Kind.RECOMPUTE: Value.SAVED, Kind.I: Value.PENDING}

_NOTHING: AbstractContextManager[Any] = nullcontext()

Handlers = list[tuple[Callable[..., None], Instruction]]  # the function to call for each instruction
Spans = list[tuple[int, Stamp, Stamp]]  # place, start and end


@contextmanager
def _default_modes(kind: str) -> Iterator[None]:
    """Run with torch's default modes, as in a new thread: modes around the user's call must not affect backwards."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(kind, enabled=False):
        yield


def _in_range(do: Callable[..., None], i: Instruction) -> None:
    """Run an action in a range of torch's profiler that has its name; a graph's range is around its launch."""
    with torch.profiler.record_function(str(i.action)):
        do(i)


class Executor:
    """The executor of one lane. `program_of` returns the program of any lane, for errors."""

    def __init__(
        self, program: LaneProgram, stages: Mapping[int, StageRun], transport: Transport, board_row: memoryview,
        *, program_of: Callable[[int], LaneProgram], streams: Streams, versions: WeightVersions | None = None,
    ) -> None:  # fmt: skip
        self.program_of = program_of
        self.lane, self.program, self.stages, self.transport = program.lane, program, stages, transport
        self.versions, self.streams = versions, streams  # no versions: weights do not change within a step
        self._row = board_row
        self._kind = next(iter(stages.values())).device.type
        self._local = {(i.stage, i.mb) for i in program.instructions if i.kind is Kind.F}
        self._recomputing = {stage for stage, _ in program.recomputed}
        self.handlers: Handlers = [(_HANDLERS[i.kind].__get__(self), i) for i in program.instructions]
        self._step: Any = None  # the current Step
        self._current: Instruction | None = None  # for errors
        self._hint = ""  # for errors
        self.held_bytes: list[int] = []  # after each action of the last step, if memory was measured
        self.stage_bytes: dict[tuple[Value, int], int] = {}  # the most that a stage held for one micro-batch
        self._clear()

    def _clear(self) -> None:
        self._records: dict[tuple[int, int], Record] = {}
        self._arrived: dict[Key, list[Any]] = {}
        self._leaving: dict[Key, list[Any]] = {}

    def run(self, step: Step, spans: Spans | None = None) -> None:
        """Run the lane's program for one step; append the start and the end of each action to `spans`.

        Raises:
            LaneError: if an action failed; names the action, the stage and the line in the model.
            Stopped: if another lane failed.
        """
        tape = None if step.tapes is None else step.tapes[self.lane]
        self.held_bytes, self.stage_bytes = [], {}
        self.transport.start(step.number, sum(step.batch.sizes))
        self._row[2] = step.number
        try:
            # a replay repeats captured work, which the modes around the user's call cannot change
            modes = _NOTHING if tape is not None and tape.is_replay else _default_modes(self._kind)
            with modes, self.streams.running():
                self._step, handlers = (step, self.handlers) if tape is None else tape.open(step)
                if torch.autograd.profiler._is_profiler_enabled:
                    handlers = [(partial(_in_range, do), i) for do, i in handlers]
                if step.watch is None:
                    self._run(handlers, self._step, spans)
                else:
                    self._run([(partial(self._watched, step.watch, do), i) for do, i in handlers], self._step, spans)
                for run in self.stages.values():
                    run.end_step(step)
        except (Stopped, LaneError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise LaneError(self._message(self._current, error)) from error
        finally:
            self._clear()
            self._step = None  # also frees the user's batch
            if tape is not None:
                tape.close()
            if self.versions is not None:
                self.versions.end()
            self._row[0], self._row[1] = -1, time.monotonic_ns()

    def _run(self, handlers: Handlers, step: Step, spans: Spans | None) -> None:
        row, clock, num_mbs = self._row, time.monotonic_ns, step.batch.num_mbs
        stamp = self.streams.stamp
        for at, (do, instruction) in enumerate(handlers):
            if instruction.mb >= num_mbs and instruction.kind is not Kind.U:
                continue
            self._current = instruction
            row[0], row[1] = at, clock()
            if spans is None:
                do(instruction)
                continue
            begin = stamp()
            do(instruction)
            spans.append((instruction.place, begin, stamp()))
            if step.measures_memory:
                self._measure_memory(instruction)
        self._current = None

    def _watched(self, watch: Watch, do: Callable[[Instruction], None], i: Instruction) -> None:
        """Run an action, and call the watch before and after it."""
        number = self._step.number
        if not watch.before(self.lane, number, i):
            return
        try:
            do(i)
        except BaseException:
            watch.failed(self.lane, number, i)
            raise
        watch.after(self.lane, number, i, self._made_by(i))

    def _made_by(self, i: Instruction) -> list[torch.Tensor]:
        """Return the new tensors of an action; an output that is an input or a held tensor of the stage is not new."""
        run, mb, record = self.stages[i.stage], i.mb, self._records.get((i.stage, i.mb))
        found: list[Any] = []
        if i.kind in (Kind.F, Kind.RECOMPUTE):
            for edge in run.out_of if i.kind is Kind.F else ():
                found += self._sent(Key("F", i.stage, edge.target, mb))
            found += [] if record is None else [*record.made, record.loss]
            found += [self._step.losses.get(mb)] if run.is_last else []
            given = [*self._step.batch.inputs[mb].values(), *([] if record is None else record.arrived())]
            return new_tensors([*run.stage.held.tensors(), *given], found)
        if i.kind in (Kind.B, Kind.I):
            for edge in run.into:
                found += self._sent(Key("B", i.stage, edge.source, mb))
        if i.kind in (Kind.B, Kind.I, Kind.W):
            found += [parameter.grad for parameter in run.stage.parameters()]
        if i.kind in (Kind.RECV_F, Kind.RECV_B):
            found += self._arrived.get(Key.of(i.kind, i.stage, i.peer, mb), [])
        return new_tensors((), found)

    def _put(self, key: Key, values: list[Any]) -> None:
        """Store values for another stage of this lane, or until they are sent."""
        (self._arrived if (key.target, key.mb) in self._local else self._leaving)[key] = values

    def _sent(self, key: Key) -> list[Any]:
        return self._leaving.get(key) or self._arrived.get(key) or []

    def settle(self, spans: Spans) -> list[tuple[int, int, int]]:
        """Return spans in nanoseconds on the host's clock; on a GPU, wait for their end."""
        nanoseconds = self.streams.nanoseconds
        return [(place, nanoseconds(start), nanoseconds(end)) for place, start, end in spans]

    def _measure_memory(self, i: Instruction) -> None:
        """Record the bytes that the lane holds after an action."""
        held = {key: record.held_bytes() for key, record in self._records.items()}
        self.held_bytes.append(sum(held.values()))
        key = (i.stage, i.mb)
        if key not in held:
            return
        size, value = held[key], _HELD_AFTER.get(i.kind)
        if key in self.program.recomputed and i.kind is Kind.F:
            value = Value.INPUT
        elif value is Value.SAVED and i.stage in self._recomputing:  # without its input, which is counted separately
            size -= self._records[key].arrived_bytes()
        if value is not None:
            self.stage_bytes[value, i.stage] = max(size, self.stage_bytes.get((value, i.stage), 0))

    def _message(self, instruction: Instruction | None, error: Exception) -> str:
        if instruction is None:
            return f"lane {self.lane}: {error_in_short(error)}"
        action = instruction.action
        where = (
            f"lane {self.lane}, stage {action.stage}, micro-batch {action.mb}, action {action} ({action.kind.words})"
        )
        hint, self._hint = self._hint or self._hint_of_one(error), ""
        return f"{where}: {error_in_short(error)} {line_of(error)}".rstrip() + hint

    def _hint_of_one(self, error: Exception) -> str:
        """Return advice if batch norm got a micro-batch of one sample; otherwise an empty string."""
        sizes = () if self._step is None else self._step.batch.sizes
        if len(sizes) < 2 or 1 not in sizes or "Expected more than 1 value per channel" not in str(error):
            return ""
        return (
            f". The batch of {sum(sizes)} samples runs as micro-batches of {', '.join(map(str, sizes))}, and batch "
            "norm cannot train on a single sample. Pass drop_last=True to the loader, or use fewer micro_batches"
        )

    # ---- one handler per kind

    def _forward(self, i: Instruction) -> None:
        run, step, mb = self.stages[i.stage], self._step, i.mb
        arrived = {edge.source: self._arrived.pop(Key("F", edge.source, i.stage, mb)) for edge in run.into}
        key = (i.stage, mb)
        recomputes = key in self.program.recomputed
        if self.versions is not None:
            self.versions.use(i.stage, i.version)
        try:
            record = run.forward(step, mb, arrived, is_split=key in self.program.split, recomputes=recomputes)
        except Exception:
            self._hint = dtype_hint(arrived, run.stage)
            raise
        if run.is_last and record.loss is not None:
            step.losses[mb] = record.loss.detach()
        for edge in run.out_of:
            self._put(Key("F", i.stage, edge.target, mb), run.outgoing(record, edge, recomputes=recomputes))
        if step.mode.has_backward:
            if recomputes:
                record.made, record.loss = (), None
            record.version = i.version
            self._records[key] = record

    def _recompute(self, i: Instruction) -> None:
        key = (i.stage, i.mb)
        record = self._records[key]
        if self.versions is not None:
            self.versions.use(i.stage, record.version)
        run, step = self.stages[i.stage], self._step
        run.recompute(step, i.mb, record, is_split=key in self.program.split)
        if run.is_last and record.loss is not None:
            step.losses[i.mb] = record.loss.detach()

    def _backward(self, i: Instruction) -> None:
        run, mb = self.stages[i.stage], i.mb
        key = (i.stage, mb)
        record = self._records.pop(key)
        gradients = {edge.target: self._arrived.pop(Key("B", edge.target, i.stage, mb)) for edge in run.out_of}
        made = run.backward(self._step, mb, record, gradients)
        for edge in run.into:
            self._put(Key("B", i.stage, edge.source, mb), made[edge.source])
        if record.pending is not None:
            record.leaves, record.is_pending = {}, True
            self._records[key] = record

    def _weight_grad(self, i: Instruction) -> None:
        pending = self._records.pop((i.stage, i.mb)).pending
        if pending is not None:
            pending.run()

    def _update(self, i: Instruction) -> None:
        if self.versions is None:
            raise LaneError(f"lane {self.lane}: {i.action} updates weights, but there is no optimizer")
        self.versions.update(i.stage, i.version, int(self._row[0]))

    def leaving(self, i: Instruction) -> tuple[Key, list[Any] | None]:
        """Return the key and the values of a send; the values are None if the two stages exchange none."""
        key = Key.of(i.kind, i.stage, i.peer, i.mb)
        return key, self._leaving.get(key)

    def _send(self, i: Instruction) -> None:
        key, values = self.leaving(i)
        if values is not None:
            del self._leaving[key]
            self.transport.send(key, i.lane, values)

    def fetch(self, i: Instruction, into: Workspace | None = None) -> list[Any] | None:
        """Return the values of a receive; None if the two stages exchange none."""
        run = self.stages[i.stage]
        is_forward = i.kind is Kind.RECV_F
        peers = [edge.source for edge in run.into] if is_forward else [edge.target for edge in run.out_of]
        if i.peer not in peers:
            return None
        return list(self.transport.receive(Key.of(i.kind, i.stage, i.peer, i.mb), i.lane, into))

    def _receive(self, i: Instruction, into: Workspace | None = None) -> None:
        values = self.fetch(i, into)
        if values is not None:
            self._arrived[Key.of(i.kind, i.stage, i.peer, i.mb)] = values

    def _offload(self, i: Instruction) -> None:
        saved = self._records[i.stage, i.mb].saved
        if saved is not None:
            saved.offload()

    def _fetch(self, i: Instruction) -> None:
        saved = self._records[i.stage, i.mb].saved
        if saved is not None:
            saved.fetch()


_HANDLERS: dict[Kind, Callable[..., None]] = {
    Kind.F: Executor._forward,
    Kind.B: Executor._backward,
    Kind.I: Executor._backward,
    Kind.W: Executor._weight_grad,
    Kind.U: Executor._update,
    Kind.SEND_F: Executor._send,
    Kind.SEND_B: Executor._send,
    Kind.RECV_F: Executor._receive,
    Kind.RECV_B: Executor._receive,
    Kind.RECOMPUTE: Executor._recompute,
    Kind.OFFLOAD: Executor._offload,
    Kind.FETCH: Executor._fetch,
}
if missing := [kind for kind in Kind if kind not in _HANDLERS]:  # fails at import, not in the middle of a run
    raise RuntimeError(f"the executor has no handler for: {missing}")
