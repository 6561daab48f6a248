"""Injector: inject faults at chosen places, to test or rehearse how a training handles them."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import UsageError
from penstock.faults.fault_spec import Chaos, FaultSpec, parse

if TYPE_CHECKING:
    import torch

    from penstock.runtime.lane_program import Instruction

ENVIRONMENT = "PENSTOCK_FAULTS"


class Injector:
    """Injects faults.

    `pipe.watch = injector` injects faults at the actions of a pipeline; `injector.at("save", lane=0, step=3)` marks a
    place outside of actions.

    >>> injector = Injector.parse("raise@step=3,action=save")
    >>> injector.at("save", lane=0, step=2)
    >>> injector.at("save", lane=0, step=3)
    Traceback (most recent call last):
    RuntimeError: injected fault: raise@step=3,action=save (lane 0, step 3, save)

    Args:
        wanted: the faults to inject; Chaos for random faults.
        rank: the number of this process.
        world_size: the number of processes.
        attempt: the number of restarts so far.
    """

    def __init__(
        self, wanted: Sequence[FaultSpec | Chaos], *, rank: int = 0, world_size: int = 1, attempt: int = 0
    ) -> None:
        self.wanted, self.rank, self.attempt = tuple(wanted), rank, attempt
        own = [one for one in self.wanted if isinstance(one, FaultSpec) and one.rank in (None, rank)]
        self._at_actions = [one for one in own if one.attempt == attempt and one.is_at_action]
        self._at_points = [one for one in own if one.attempt == attempt and not one.is_at_action]
        chaos = [one for one in self.wanted if isinstance(one, Chaos)]
        if len(chaos) > 1:
            raise UsageError("faults: mtti= is given twice")
        self._random_faults = _RandomFaults(chaos[0], rank, world_size, attempt) if chaos else None
        self._had_oom: set[tuple[FaultSpec, int, int]] = set()
        self._step: int | None = None  # counted by the caller of at(); a pipeline restarts at 1 in each process

    @classmethod
    def parse(cls, text: str, *, rank: int = 0, world_size: int = 1, attempt: int = 0) -> Injector:
        """Return an injector for faults in text form: `kill@lane=1,step=3,action=B2; nan@lane=0,step=5,action=F1`.

        Raises:
            UsageError: with the fault in the text.
        """
        return cls(parse(text), rank=rank, world_size=world_size, attempt=attempt)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Injector | None:
        """Return an injector for the faults in PENSTOCK_FAULTS, or None; torchrun's variables give the rank."""
        given = os.environ if environment is None else environment
        text = given.get(ENVIRONMENT, "")
        if not text.strip():
            return None
        rank, size, attempt = (
            int(given.get(name) or default)
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("TORCHELASTIC_RESTART_COUNT", 0))
        )
        return cls.parse(text, rank=rank, world_size=size, attempt=attempt)

    def at(self, point: str, *, lane: int, step: int) -> None:
        """Inject the faults for a point outside of actions: step, data, optimizer, save.

        From then on, `step` is also the step of the actions.

        Args:
            point: the point.
            lane: the lane.
            step: the step.
        """
        self._step = step
        where = f"lane {lane}, step {step}, {point}"
        for fault in self._at_points:
            if fault.action == point and fault.lane in (None, lane) and fault.step in (None, step):
                _INJECT[fault.kind](fault, where)
        self._inject_random(where)

    # ---- called by a pipeline

    def before(self, lane: int, step_number: int, instruction: Instruction) -> bool:
        """Inject the faults before an action; return whether the action runs."""
        is_done = True
        for fault in self._due(lane, step_number, instruction):
            if fault.kind == "drop":
                is_done = False
            elif fault.kind == "oom":
                self._run_out_of_memory_once(fault, lane, step_number, instruction)
            elif fault.kind not in ("nan", "corrupt"):
                _INJECT[fault.kind](fault, self._where(lane, step_number, instruction))
        if self._random_faults is not None:
            self._inject_random(self._where(lane, step_number, instruction))
        return is_done

    def _run_out_of_memory_once(self, fault: FaultSpec, lane: int, step_number: int, instruction: Instruction) -> None:
        """Raise out of memory once per step, but not when the step runs again with smaller micro-batches."""
        key = (fault, lane, step_number if self._step is None else self._step)
        if key not in self._had_oom:
            self._had_oom.add(key)
            _INJECT[fault.kind](fault, self._where(lane, step_number, instruction))

    def after(self, lane: int, step_number: int, instruction: Instruction, values: Sequence[torch.Tensor]) -> None:
        """Change the results of an action if a fault says so."""
        for fault in self._due(lane, step_number, instruction):
            if fault.kind == "nan":
                _fill_with_nan(values)
            elif fault.kind == "corrupt":
                _flip_bit(values)

    def failed(self, lane: int, step_number: int, instruction: Instruction) -> None:
        """Do nothing when an action failed."""

    def _due(self, lane: int, step_number: int, i: Instruction) -> Iterator[FaultSpec]:
        step = step_number if self._step is None else self._step
        for fault in self._at_actions:
            if (
                fault.lane in (None, lane)
                and fault.step in (None, step)
                and fault.is_action(i.kind.value, i.stage, i.mb)
            ):
                yield fault

    def _where(self, lane: int, step_number: int, instruction: Instruction) -> str:
        return f"lane {lane}, step {step_number if self._step is None else self._step}, {instruction.action}"

    def _inject_random(self, where: str) -> None:
        fault = None if self._random_faults is None else self._random_faults.due()
        if fault is not None:
            _INJECT[fault.kind](fault, where)

    def __repr__(self) -> str:
        return f"Injector({'; '.join(map(str, self.wanted))!r})"


class _RandomFaults:
    """Random faults: all processes draw the same ones, and each injects its own."""

    def __init__(self, chaos: Chaos, rank: int, world_size: int, attempt: int) -> None:
        self._chaos, self._rank, self._size = chaos, rank, world_size
        self._random = random.Random(f"{chaos.seed} {attempt}")  # noqa: S311 - not a secret
        self._start = time.monotonic()
        self._next = 0.0
        self._draw()

    def _draw(self) -> None:
        self._next += self._random.expovariate(1.0 / self._chaos.mtti)
        self._victim, self._kind = self._random.randrange(self._size), self._random.choice(self._chaos.kinds)

    def due(self) -> FaultSpec | None:
        """Return the fault of this process that is due now, if any."""
        while time.monotonic() - self._start >= self._next:
            victim, kind = self._victim, self._kind
            self._draw()
            if victim == self._rank:
                return FaultSpec(kind)
        return None


# ---- the faults


def _kill(fault: FaultSpec, where: str) -> None:
    _announce(fault, where)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may take a moment


def _stop(fault: FaultSpec, where: str) -> None:
    _announce(fault, where)
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(fault: FaultSpec, where: str) -> NoReturn:
    _announce(fault, where)
    sys.stdout.flush()
    os._exit(1 if fault.code is None else fault.code)  # works from any thread


def _raise(fault: FaultSpec, where: str) -> NoReturn:
    raise RuntimeError(f"injected fault: {fault} ({where})")


def _run_out_of_memory(fault: FaultSpec, where: str) -> NoReturn:
    import torch

    raise torch.OutOfMemoryError(f"injected fault: {fault} ({where}): out of memory")


def _delay(fault: FaultSpec, where: str) -> None:  # noqa: ARG001 - the same signature for all
    time.sleep(fault.seconds or 0.0)


def _announce(fault: FaultSpec, where: str) -> None:
    """Print the fault first: afterwards this process cannot."""
    sys.stderr.write(f"penstock: injected fault: {fault} ({where})\n")
    sys.stderr.flush()


_INJECT: dict[str, Callable[[FaultSpec, str], None]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "raise": _raise,
    "oom": _run_out_of_memory,
    "delay": _delay,
}  # the other kinds change values or skip messages


def _fill_with_nan(values: Sequence[torch.Tensor]) -> None:
    # .data: autograd does not notice, as with a broken device
    for value in values:
        if value.is_floating_point() or value.is_complex():
            value.data.fill_(float("nan"))


def _flip_bit(values: Sequence[torch.Tensor]) -> None:
    """Flip the second-highest bit of the first number; in a float it belongs to the exponent."""
    import torch

    for value in values:
        if value.numel() and not value.is_complex():
            first = value.data.flatten()[:1].clone()
            raw = first.view(torch.uint8)
            raw[-1] ^= 0x40
            value.data[(0,) * value.dim()] = first[0]
            return
