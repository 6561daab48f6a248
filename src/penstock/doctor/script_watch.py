"""Watch: looks at some steps of a training, and reports what makes the host or the GPU wait.

A step ends with an optimizer's `step()`. The first ones warm up. The others are looked at, operation by operation, but
for some that are timed with nothing in their way but, on a GPU, torch's profiler: looking slows the host down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from penstock.devices import cuda
from penstock.doctor.dispatch_watch import Looking
from penstock.doctor.doctor_report import Report
from penstock.doctor.findings import Seen, make_report
from penstock.doctor.gpu_busy import Busy, Profiling
from penstock.doctor.gpu_tensors import OnGpu, Where, WouldBe
from penstock.doctor.interception import SyncWarnings, hooked
from penstock.doctor.sightings import Phase, Tally
from penstock.doctor.source_lines import NOWHERE, Place, find_place
from penstock.errors import UsageError

__all__ = ["Watch", "watch"]

_WARM = 2
_FIRST_LOOKED, _TIMED = 3, 3  # steps; a run may be short, so some are looked at before any is timed


def watch(steps: int | None = None, *, warm: int = _WARM) -> Watch:
    """Return a watch for a `with` block around a training loop; its `report` says what was found.

    It sees all operations of this thread, and of other threads the explicit waits, printed tensors, data loaders, and
    on a GPU what torch itself reports. Without a GPU it tells the places that would wait for one.

    Args:
        steps: watch so many, those to warm up included, and no more; by default as long as the block lasts.
        warm: steps that are left out.

    >>> device = "cuda" if torch.cuda.is_available() else "cpu"
    >>> model = torch.nn.Linear(2, 1, device=device)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with watch(warm=1) as watching:
    ...     for _ in range(3):
    ...         loss = model(torch.ones(1, 2, device=device)).sum()
    ...         loss.backward()
    ...         optimizer.step()
    ...         value = loss.item()
    >>> [(finding.kind.value, finding.per_step) for finding in watching.report.findings]
    [('item', 1.0)]
    """
    return Watch(steps, warm=warm)


class Watch:
    """A watch; see `watch`.

    Args:
        steps: to watch, in all; None for no end.
        warm: of these, that are left out.
        where: which tensors are on the device; found by itself where it is not given.
        at_end: called when the last step is over.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        warm: int = _WARM,
        where: Where | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        _check(steps, warm)
        self._steps, self._warm, self._at_end = steps, warm, at_end
        self._where: Where = where or (OnGpu() if cuda.num_gpus() else WouldBe())
        self._thread = threading.get_ident()
        self._tally = Tally()
        self._looking = Looking(self._tally, self._where, self._thread)
        self._warnings = SyncWarnings(self._tally, self._thread)
        self._profiling = Profiling()
        self._busy: Busy | None = None
        self._phase = self._phase_of(0)
        self._step_seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        self._num_steps = 0
        self._is_by_hand = False
        self._optimizers: set[int] = set()  # by whose steps steps were counted
        self._is_looking = False
        self._is_open = False
        self._step_begin = 0.0
        self._step_place: Place = NOWHERE
        self._stack = ExitStack()
        self._report: Report | None = None

    def __enter__(self) -> Self:
        if self._is_open or self._report is not None:
            raise UsageError("a watch is used once; make another")
        self._is_open = True
        self._stack.enter_context(hooked(self._tally, self._where, self._thread))
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._after_optimizer(optimizer))
        self._stack.callback(hook.remove)
        self._look()
        self._step_begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._stop_looking()  # where a mode of the user's own was in the way before

    def step(self) -> None:
        """Say that a step is over, where no optimizer says so; from then on those of optimizers do not count."""
        if not self._is_by_hand:
            self._is_by_hand = True
            self._begin_again()
        self._advance()

    @property
    def report(self) -> Report:
        """What was found; the watch ends with it."""
        self.close()
        if self._report is None:
            raise UsageError("the watch has not begun: use it in a `with` block")
        return self._report

    def close(self) -> None:
        """End the watch. Does nothing where it has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_looking()
        self._looking.is_on = False
        self._stop_timing()
        self._warnings.stop()
        self._stack.close()
        self._report = make_report(self._seen())

    # ---- steps

    def _begin_again(self) -> None:
        """Forget all steps: those of optimizers were counted until it was clear that they do not count."""
        self._stop_timing()
        self._tally.clear()
        self._phase, self._num_steps, self._busy = self._phase_of(0), 0, None
        self._step_seconds = {phase: [] for phase in Phase}
        if self._is_open:
            self._look()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_by_hand and threading.get_ident() == self._thread:
            if self._is_open:
                self._optimizers.add(id(optimizer))
            self._advance()

    def _phase_of(self, step: int) -> Phase:
        """Return what a step is for."""
        if step < self._warm:
            return Phase.WARM
        is_timed = 0 <= step - self._warm - _FIRST_LOOKED < _TIMED
        return Phase.TIMED if is_timed else Phase.LOOKED

    def _advance(self) -> None:
        """End a step, and begin the next."""
        if not self._is_open:
            return
        self._step_seconds[self._phase].append(time.perf_counter() - self._step_begin)
        self._num_steps += 1
        self._step_place = find_place()
        is_last = self._num_steps == self._steps
        coming = self._phase_of(self._num_steps)
        if is_last or coming is not Phase.TIMED:
            self._stop_timing()  # before the step is over: it waits, which is not the script's doing
        self._tally.commit(self._phase)
        self._where.tidy()
        if is_last:
            self.close()
            if self._at_end is not None:
                self._at_end()
            return
        self._turn_to(coming)
        self._step_begin = time.perf_counter()

    def _turn_to(self, phase: Phase) -> None:
        """Look, or stop looking and time, as a step is for; where that cannot be, go on looking."""
        if phase is not Phase.TIMED:
            self._look()
        elif self._phase is not Phase.TIMED:
            if self._stop_looking():
                self._start_timing()
            else:
                phase = Phase.LOOKED
        self._phase = phase

    def _start_timing(self) -> None:
        if self._where.is_in_use:
            self._profiling.start()

    def _stop_timing(self) -> None:
        self._busy = self._profiling.stop() or self._busy

    def _look(self) -> None:
        if not self._is_looking:
            self._looking.__enter__()  # type: ignore[no-untyped-call]
            self._is_looking = True
        if self._where.is_in_use:
            self._warnings.start()

    def _stop_looking(self) -> bool:
        """Look no more, unless a mode that was entered later is still there; return whether it is so."""
        if not self._is_looking:
            return True
        if threading.get_ident() != self._thread or not self._looking.is_on_top:
            return False
        self._looking.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_looking = False
        self._warnings.stop()
        return True

    def _seen(self) -> Seen:
        notes = []
        if self._profiling.reason:
            notes.append(f"How busy the GPU is was not measured: {self._profiling.reason}.")
        if self._where.is_real and not self._where.is_in_use:
            notes.append("The script asked nothing of the GPU.")
        if len(self._optimizers) > 1 and not self._is_by_hand:
            notes.append(
                f"{len(self._optimizers)} optimizers take steps, and each of these counts as one; with"
                " penstock.doctor.watch() in the script, its step() says when a whole one is over."
            )
        return Seen(
            entries={phase: self._tally.entries(phase) for phase in (*Phase, None)},
            step_seconds=self._step_seconds,
            device=self._where.name,
            busy=self._busy,
            step_place=self._step_place,
            notes=tuple(notes),
        )


def _check(steps: int | None, warm: int) -> None:
    faults = []
    if isinstance(warm, bool) or not isinstance(warm, int) or warm < 0:
        faults.append(f"warm: {warm!r} must be a whole number, 0 or more")
    elif steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps <= warm):
        faults.append(f"steps: {steps!r} must be a whole number above {warm}, the steps to warm up")
    if faults:
        raise UsageError("; ".join(faults))
