"""Injector: makes faults happen where they are wanted, to test or to rehearse what a training does about them."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from penstock.errors import UsageError
from penstock.faults.fault_spec import Chaos, Wanted, parse

if TYPE_CHECKING:
    import torch

    from penstock.runtime.lane_program import Instruction

__all__ = ["ENVIRONMENT", "Injector"]

ENVIRONMENT = "PENSTOCK_FAULTS"


class Injector:
    """Makes faults happen.

    `pipe.watch = injector` lets it see the actions of a pipeline; `injector.at("save", lane=0, step=3)` is a place
    outside of them.

    >>> injector = Injector.parse("raise@step=3,action=save")
    >>> injector.at("save", lane=0, step=2)
    >>> injector.at("save", lane=0, step=3)
    Traceback (most recent call last):
    RuntimeError: a fault that was asked for: raise@step=3,action=save (lane 0, step 3, save)

    Args:
        wanted: what is to happen where; Chaos for faults at random.
        rank: of this process.
        world_size: how many processes there are.
        attempt: how often the processes were started again.
    """

    def __init__(
        self, wanted: Sequence[Wanted | Chaos], *, rank: int = 0, world_size: int = 1, attempt: int = 0
    ) -> None:
        self.wanted, self.rank, self.attempt = tuple(wanted), rank, attempt
        self._faults = [
            one
            for one in self.wanted
            if isinstance(one, Wanted) and one.attempt == attempt and one.rank in (None, rank)
        ]
        self._at_actions = [one for one in self._faults if one.is_at_action]
        self._at_points = [one for one in self._faults if not one.is_at_action]
        chaos = [one for one in self.wanted if isinstance(one, Chaos)]
        if len(chaos) > 1:
            raise UsageError("faults: mtti= stands there twice; once is enough")
        self._storm = _Storm(chaos[0], rank, world_size, attempt) if chaos else None
        self._ran_out: set[tuple[Wanted, int, int]] = set()
        self._step: int | None = None  # as the caller of at() counts them; a pipeline starts from 1 in each process

    @classmethod
    def parse(cls, text: str, *, rank: int = 0, world_size: int = 1, attempt: int = 0) -> Injector:
        """Return an injector of faults in text form, as `kill@lane=1,step=3,action=B2; nan@lane=0,step=5,action=F1`.

        Raises:
            UsageError: naming what is wrong in the text.
        """
        return cls(parse(text), rank=rank, world_size=world_size, attempt=attempt)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Injector | None:
        """Return an injector of the faults in PENSTOCK_FAULTS, in the process that torchrun says this is.

        None where there are none.
        """
        given = os.environ if environment is None else environment
        text = given.get(ENVIRONMENT, "")
        if not text.strip():
            return None
        rank, size, attempt = (
            int(given.get(name) or default)
            for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("TORCHELASTIC_RESTART_COUNT", 0))
        )
        return cls.parse(text, rank=rank, world_size=size, attempt=attempt)

    def at(self, point: str, *, lane: int, step: int, action: str | None = None) -> None:
        """Let happen what is wanted at a point outside actions: step, data, optimizer, save.

        From then on steps are counted as here, also for actions.

        Args:
            point: where this is.
            lane: on which lane.
            step: in which step.
            action: what is being done there, for the message.
        """
        self._step = step
        where = f"lane {lane}, step {step}, {action or point}"
        for fault in self._at_points:
            if fault.action == point and fault.lane in (None, lane) and fault.step in (None, step):
                _DO[fault.kind](fault, where)
        self._blow(where)

    # ---- what a pipeline tells a watch

    def before(self, lane: int, step_number: int, instruction: Instruction) -> bool:
        """Let happen what is wanted before an action; return whether the action is to be done."""
        is_done = True
        for fault in self._due(lane, step_number, instruction):
            if fault.kind == "drop":
                is_done = False
            elif fault.kind == "oom":
                self._run_out_once(fault, lane, step_number, instruction)
            elif fault.kind not in ("nan", "corrupt"):
                _DO[fault.kind](fault, self._where(lane, step_number, instruction))
        if self._storm is not None:
            self._blow(self._where(lane, step_number, instruction))
        return is_done

    def _run_out_once(self, fault: Wanted, lane: int, step_number: int, instruction: Instruction) -> None:
        """Let memory run out in a step, but not again when the step is run with smaller micro-batches."""
        key = (fault, lane, step_number if self._step is None else self._step)
        if key not in self._ran_out:
            self._ran_out.add(key)
            _DO[fault.kind](fault, self._where(lane, step_number, instruction))

    def after(self, lane: int, step_number: int, instruction: Instruction, values: Sequence[torch.Tensor]) -> None:
        """Change what an action made, where that is wanted."""
        for fault in self._due(lane, step_number, instruction):
            if fault.kind == "nan":
                _spoil(values)
            elif fault.kind == "corrupt":
                _flip(values)

    def failed(self, lane: int, step_number: int, instruction: Instruction) -> None:
        """An action failed; there is nothing to do."""

    def _due(self, lane: int, step_number: int, i: Instruction) -> Iterator[Wanted]:
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

    def _blow(self, where: str) -> None:
        fault = None if self._storm is None else self._storm.due()
        if fault is not None:
            _DO[fault.kind](fault, where)

    def __repr__(self) -> str:
        return f"Injector({'; '.join(map(str, self.wanted))!r})"


class _Storm:
    """Faults at random: all processes draw the same ones, and each lets those happen that are its own."""

    def __init__(self, chaos: Chaos, rank: int, world_size: int, attempt: int) -> None:
        self._chaos, self._rank, self._size = chaos, rank, world_size
        self._random = random.Random(f"{chaos.seed} {attempt}")  # noqa: S311 - nothing secret
        self._start = time.monotonic()
        self._next = 0.0
        self._draw()

    def _draw(self) -> None:
        self._next += self._random.expovariate(1.0 / self._chaos.mtti)
        self._victim, self._kind = self._random.randrange(self._size), self._random.choice(self._chaos.kinds)

    def due(self) -> Wanted | None:
        """Return what happens to this process now."""
        while time.monotonic() - self._start >= self._next:
            victim, kind = self._victim, self._kind
            self._draw()
            if victim == self._rank:
                return Wanted(kind)
        return None


# ---- what happens


def _kill(fault: Wanted, where: str) -> None:
    _tell(fault, where)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # a signal to oneself may take a moment


def _stop(fault: Wanted, where: str) -> None:
    _tell(fault, where)
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit(fault: Wanted, where: str) -> NoReturn:
    _tell(fault, where)
    sys.stdout.flush()
    os._exit(1 if fault.code is None else fault.code)  # from any thread


def _raise(fault: Wanted, where: str) -> NoReturn:
    raise RuntimeError(f"a fault that was asked for: {fault} ({where})")


def _run_out(fault: Wanted, where: str) -> NoReturn:
    import torch

    raise torch.OutOfMemoryError(f"a fault that was asked for: {fault} ({where}): out of memory")


def _delay(fault: Wanted, where: str) -> None:  # noqa: ARG001 - as the others
    time.sleep(fault.seconds or 0.0)


def _nothing(fault: Wanted, where: str) -> None:
    """Of what happens to values, not to the process."""


def _tell(fault: Wanted, where: str) -> None:
    """Say what happens: afterwards this process cannot."""
    sys.stderr.write(f"penstock: a fault that was asked for: {fault} ({where})\n")
    sys.stderr.flush()


_DO: dict[str, Callable[[Wanted, str], None]] = {
    "kill": _kill,
    "stop": _stop,
    "exit": _exit,
    "raise": _raise,
    "oom": _run_out,
    "delay": _delay,
    "nan": _nothing,
    "corrupt": _nothing,
    "drop": _nothing,
}


def _spoil(values: Sequence[torch.Tensor]) -> None:
    # .data: autograd must not notice, as it would not notice a broken device
    for value in values:
        if value.is_floating_point() or value.is_complex():
            value.data.fill_(float("nan"))


def _flip(values: Sequence[torch.Tensor]) -> None:
    """Flip the second-highest bit of the first number: of a float it is in the exponent."""
    import torch

    for value in values:
        if value.numel() and not value.is_complex():
            first = value.data.flatten()[:1].clone()
            raw = first.view(torch.uint8)
            raw[-1] ^= 0x40
            value.data[(0,) * value.dim()] = first[0]
            return
