"""Lane graphs: the actions of a lane as CUDA graphs, captured and replayed in the order of the lane.

A capture runs the lane's program once and computes nothing. Each compute action becomes a CUDA graph, and the values
that it makes for other actions keep their addresses. All graphs of a lane share one memory pool. They allocate and free
memory in the same order as without graphs, so the peak is the same. Values from outside a graph lie in slots. Each
micro-batch has its own slots for inputs and targets; a value of another lane has a slot while it is in use. Sent values
stay in memory until the end of the step, so a late receiver finds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from penstock.devices.graph_capture import CudaGraphs, Replay
from penstock.devices.streams import Event, Streams, Workspace
from penstock.model.structure import flatten, rebuild
from penstock.runtime.executor import Executor, Handlers
from penstock.runtime.lane_program import Instruction
from penstock.runtime.stage_run import StageRun
from penstock.runtime.step import Batch, Step
from penstock.schedule.actions import Kind

COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.RECOMPUTE})
_RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
_FORWARDS = frozenset({Kind.F, Kind.RECOMPUTE})
_CAPTURE_LOCK = threading.Lock()  # one capture at a time per process: all lanes share autograd's threads


@dataclass
class _Slot:
    """Memory for a value of another lane."""

    tensor: torch.Tensor  # the memory
    free: Event | None  # on a GPU, an event after the last use of the memory
    is_used_again: bool = False  # whether another value of the same step used the memory before


@dataclass
class _SlotPool:
    """The slots of a lane; free slots are used again."""

    streams: Streams
    free: dict[tuple[Any, ...], list[_Slot]] = field(default_factory=dict)

    def take(self, like: torch.Tensor, device: torch.device) -> _Slot:
        """Return a slot for a value of this shape, with these strides and of this type."""
        waiting = self.free.get(_kind_of(like))
        if waiting:
            old = waiting.pop()
            return _Slot(old.tensor, old.free, is_used_again=True)
        memory = torch.empty_like(like, device=device, requires_grad=False)
        return _Slot(memory, self.streams.event())

    def give(self, slot: _Slot) -> None:
        """Return a slot to the pool."""
        self.free.setdefault(_kind_of(slot.tensor), []).append(slot)


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.shape, tensor.stride(), tensor.dtype)


class Tape:
    """The step of one lane as replays of CUDA graphs.

    Args:
        handlers: the function to call for each instruction.
        scales: memory for the factor of each micro-batch's loss; None in lanes without the last stage.
        kept: the tensors that the lane sends; the tape keeps them in memory.
    """

    is_replay = True

    def __init__(self, handlers: Handlers, scales: torch.Tensor | None, kept: Sequence[torch.Tensor]) -> None:
        self._handlers, self._scales, self._kept = handlers, scales, kept
        self._loaded: list[float] = []
        self.step: Step | None = None

    def open(self, step: Step) -> tuple[Step, Handlers]:
        """Begin a step: return it, and the function to call for each instruction."""
        self.step = step
        if self._scales is not None and (step.factor is not None or self._loaded != list(step.scales)):
            self._loaded = list(step.scales)
            self._scales.copy_(torch.tensor(self._loaded, dtype=self._scales.dtype), non_blocking=True)
            if step.factor is not None:
                self._loaded = []  # the factor changes them, so the next step loads them again
                self._scales.mul_(step.factor.to(self._scales.device, non_blocking=True))
        return step, self._handlers

    def close(self) -> None:
        """End a step, and drop the reference to it."""
        self.step = None

    def forget(self) -> None:
        """Drop the graphs; they refer to their capture, which refers to this tape."""
        self._handlers.clear()


class Capture:
    """The capture of one lane's tape, while its executor runs its program once; calls `on_capture` after each graph."""

    is_replay = False

    def __init__(self, executor: Executor, maker: CudaGraphs, on_capture: Callable[[], None]) -> None:
        self._executor, self._maker, self._on_capture = executor, maker, on_capture
        self._streams = executor.streams
        self._stages: Mapping[int, StageRun] = executor.stages
        self._slot_pool = _SlotPool(self._streams)
        self._in_use: dict[tuple[int, int], list[_Slot]] = {}
        self._given: dict[tuple[int, str], torch.Tensor] = {}
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._kept: list[torch.Tensor] = []
        self._handlers: Handlers = [(_do_nothing, i) for i in executor.program.instructions]
        self._step: Step | None = None
        last = {(i.stage, i.mb): at for at, i in enumerate(executor.program.instructions) if i.kind in COMPUTE}
        self._last = set(last.values())
        self._device = next(iter(self._stages.values())).device
        self._scales: torch.Tensor | None = None
        self._ends = next((run for run in self._stages.values() if run.is_last), None)
        self.tape: Tape | None = None

    # ---- for the executor

    def open(self, step: Step) -> tuple[Step, Handlers]:
        """Begin: return a step whose inputs are slots, and the function to call for each instruction."""
        if self._ends is not None:
            self._scales = torch.ones(len(step.scales), dtype=torch.float64, device=self._device)
        names = {feed.given for run in self._stages.values() for feed in run.feeds if feed.given}
        if self._ends is not None:
            names |= {feed.given for feed in self._ends.results if feed.given}
        inputs: list[dict[str, torch.Tensor]] = []
        targets: list[tuple[Any, ...]] = []
        for mb, given in enumerate(step.batch.inputs):
            slots = {name: self._like(given[name]) for name in names}
            self._given |= {(mb, name): slot for name, slot in slots.items()}
            inputs.append(slots)
            found, template = flatten(step.targets[mb] if self._ends is not None else (), apart=True)
            self._targets[mb] = [self._like(tensor) for tensor in found]
            targets.append(rebuild(template, self._targets[mb]))
        self._step = replace(
            step, batch=Batch(inputs, step.batch.sizes), targets=targets, seeds=self._scales, losses={}, metrics={},
            tapes=None, over_batch=None if step.over_batch is None else step.over_batch.empty_copy(),
        )  # fmt: skip
        return self._step, [(self._captured(at, do), i) for at, (do, i) in enumerate(self._executor.handlers)]

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor, device=self._device, requires_grad=False)

    def close(self) -> None:
        """End the step; the tape is complete if all actions were captured."""
        self._streams.copy_after_compute()  # which initialized the slots
        self._step = None

    def finish(self) -> Tape:
        """Return the tape."""
        self.tape = Tape(self._handlers, self._scales, self._kept)
        return self.tape

    # ---- one instruction

    def _captured(self, at: int, do: Callable[..., None]) -> Callable[[Instruction], None]:
        def handle(i: Instruction) -> None:
            if i.kind in COMPUTE:
                self._compute(at, do, i)
            elif i.kind in _RECEIVES:
                self._receive(at, do, i)
            elif i.kind in _SENDS:
                self._send(at, do, i)
            else:
                raise RuntimeError(f"{i.action} cannot be part of a CUDA graph")

        return handle

    def _compute(self, at: int, do: Callable[[Instruction], None], i: Instruction) -> None:
        assert self._step is not None
        step, run = self._step, self._stages[i.stage]
        # a backward also runs the recomputed parts of a stage
        may_draw = i.kind in _FORWARDS or (run.recomputes_parts and i.kind is not Kind.W)
        generators = run.reseed(step, i.mb) if may_draw else ()
        with _CAPTURE_LOCK, self._streams.capturing(), self._maker.capturing(generators) as replay:
            do(i)
        self._on_capture()
        loads = self._loads(i) if i.kind is Kind.F else None
        is_end = i.kind in _FORWARDS and run.is_last
        loss, metrics = (step.losses.get(i.mb), step.metrics.get(i.mb)) if is_end else (None, None)
        freed = self._in_use.pop((i.stage, i.mb), []) if at in self._last else []
        for slot in freed:
            self._slot_pool.give(slot)
        events = [slot.free for slot in freed if slot.free is not None]
        for event in events:
            self._streams.record(event)
        draws = run if may_draw and run.has_drawn else None
        self._handlers[at] = (_ReplayAction(self, replay, loads, loss, metrics, events, draws), i)

    def _loads(self, i: Instruction) -> _Loads | None:
        """Return the values to load from the batch before a forward; each is loaded only before its first use."""
        run = self._stages[i.stage]
        feeds = [*run.feeds, *(run.results if run.is_last else ())]
        asked = dict.fromkeys(feed.given for feed in feeds if feed.given)
        given = {name: slot for name in asked if (slot := self._given.pop((i.mb, name), None)) is not None}
        targets = self._targets.pop(i.mb, []) if run.is_last else []
        return _Loads(list(given), bool(targets), [*given.values(), *targets]) if given or targets else None

    def _receive(self, at: int, do: Callable[[Instruction, Workspace], None], i: Instruction) -> None:
        slots: list[_Slot | None] = []

        def room(values: Sequence[Any]) -> list[torch.Tensor | None]:
            slots.extend(self._slot_pool.take(v, self._device) if isinstance(v, torch.Tensor) else None for v in values)
            self._wait_for(slots)
            return [None if slot is None else slot.tensor for slot in slots]

        do(i, room)
        self._in_use.setdefault((i.stage, i.mb), []).extend(slot for slot in slots if slot is not None)
        rooms = [None if slot is None else slot.tensor for slot in slots]
        executor = self._executor

        def receive(i: Instruction) -> None:
            self._wait_for(slots)
            executor.fetch(i, lambda _: rooms)

        self._handlers[at] = (receive, i)

    def _wait_for(self, slots: Sequence[_Slot | None]) -> None:
        """Let the copy stream wait until slots that are used again are free."""
        for slot in slots:
            if slot is not None and slot.is_used_again:
                self._streams.copy_after(slot.free)

    def _send(self, at: int, do: Callable[[Instruction], None], i: Instruction) -> None:
        executor = self._executor
        key, values = executor.leaving(i)
        do(i)
        if values is not None:
            sent = values
            self._kept += [value for value in sent if isinstance(value, torch.Tensor)]
            self._handlers[at] = (lambda i: executor.transport.send(key, i.lane, sent), i)

    @property
    def current_step(self) -> Step:
        """The step that is being replayed."""
        assert self.tape is not None
        assert self.tape.step is not None
        return self.tape.step

    @property
    def streams(self) -> Streams:
        """The streams of the lane."""
        return self._streams


def _do_nothing(i: Instruction) -> None:
    """Do nothing: the two stages exchange no values, or the batch has too few samples for this micro-batch."""


@dataclass(frozen=True)
class _Loads:
    """The values that an action needs from the batch: inputs by name, the target if `has_target`; and their slots."""

    names: list[str]
    has_target: bool
    slots: list[torch.Tensor]

    def fetch(self, step: Step, mb: int, streams: Streams) -> None:
        """Copy the values of a micro-batch into the slots."""
        given = step.batch.inputs[mb]
        values = [given[name] for name in self.names]
        if self.has_target:
            target = step.targets[mb]
            is_plain = len(target) == 1 and type(target[0]) is torch.Tensor
            values += target if is_plain else flatten(target, apart=True)[0]
        streams.bring(values, None, lambda _: self.slots)


@dataclass(slots=True)
class _ReplayAction:
    """The replay of one action."""

    capture: Capture
    replay: Replay
    loads: _Loads | None
    loss: torch.Tensor | None
    metrics: dict[str, torch.Tensor] | None
    events: Sequence[Event]
    draws: StageRun | None

    def __call__(self, i: Instruction) -> None:
        streams = self.capture.streams
        if self.loads is not None:
            self.loads.fetch(self.capture.current_step, i.mb, streams)
        if self.draws is not None:
            self.draws.reseed(self.capture.current_step, i.mb)
        self.replay()
        if self.loss is not None:
            self.capture.current_step.losses[i.mb] = self.loss
        if self.metrics is not None:
            self.capture.current_step.metrics[i.mb] = self.metrics
        for event in self.events:
            streams.record(event)
