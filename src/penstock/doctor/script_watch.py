"""Script watch: observe some steps of a training, and report what makes the host or the GPU wait.

A step ends with an optimizer's `step()`. The first steps warm up. Most others are observed, operation by operation. A
few are only timed, with nothing active but torch's profiler, because observation slows the host down.
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
from penstock.doctor.dispatch_watch import DispatchWatch
from penstock.doctor.doctor_report import Report
from penstock.doctor.findings import Observations, make_report
from penstock.doctor.gpu_busy import Busy, Profiling
from penstock.doctor.gpu_tensors import AssumedGpuTensors, GpuTensors
from penstock.doctor.interception import SyncWarnings, intercepted
from penstock.doctor.sightings import Phase, Tally
from penstock.doctor.source_lines import NOWHERE, Place, find_place
from penstock.errors import UsageError

_WARM = 2
_FIRST_OBSERVED, _TIMED = 3, 3  # steps; a run may be short, so observed steps come before timed ones


def watch(steps: int | None = None, *, warm: int = _WARM) -> Watch:
    """Return a watch for a `with` block around a training loop; its `report` has the findings.

    It sees all operations of this thread. In other threads it sees explicit waits, printed tensors and data loaders,
    and on a GPU what torch itself reports. Without a GPU, it reports the lines that would wait for one.

    Args:
        steps: the number of steps to watch, including warm-up steps; by default, all steps in the block.
        warm: the number of warm-up steps.

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
        steps: the number of steps to watch; None for no limit.
        warm: the number of warm-up steps among them.
        where: which tensors are on the device; by default found automatically.
        at_end: called after the last step.
    """

    def __init__(
        self,
        steps: int | None = None,
        *,
        warm: int = _WARM,
        where: GpuTensors | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        _check(steps, warm)
        self._steps, self._warm, self._at_end = steps, warm, at_end
        self._where: GpuTensors = where or (GpuTensors() if cuda.num_gpus() else AssumedGpuTensors())
        self._thread = threading.get_ident()
        self._tally = Tally()
        self._dispatch_watch = DispatchWatch(self._tally, self._where, self._thread)
        self._warnings = SyncWarnings(self._tally, self._thread)
        self._profiling = Profiling()
        self._busy: Busy | None = None
        self._phase = self._phase_of(0)
        self._step_seconds: dict[Phase, list[float]] = {phase: [] for phase in Phase}
        self._num_steps = 0
        self._is_manual = False
        self._optimizers: set[int] = set()  # the optimizers whose step() counted
        self._is_observing = False
        self._is_open = False
        self._step_begin = 0.0
        self._step_place: Place = NOWHERE
        self._stack = ExitStack()
        self._report: Report | None = None

    def __enter__(self) -> Self:
        if self._is_open or self._report is not None:
            raise UsageError("a watch can be used only once; make another")
        self._is_open = True
        self._stack.enter_context(intercepted(self._tally, self._where, self._thread))
        hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._after_optimizer(optimizer))
        self._stack.callback(hook.remove)
        self._start_observing()
        self._step_begin = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._stop_observing()  # in case a mode of the user prevented it before

    def step(self) -> None:
        """End a step; from then on, only this method ends steps, and optimizers do not."""
        if not self._is_manual:
            self._is_manual = True
            self._restart()
        self._advance()

    @property
    def report(self) -> Report:
        """The findings; reading it ends the watch."""
        self.close()
        if self._report is None:
            raise UsageError("the watch has not started: use it in a `with` block")
        return self._report

    def close(self) -> None:
        """End the watch; does nothing if it has ended."""
        if not self._is_open:
            return
        self._is_open = False
        self._stop_observing()
        self._dispatch_watch.is_on = False
        self._stop_timing()
        self._warnings.stop()
        self._stack.close()
        self._report = make_report(self._observations())

    # ---- steps

    def _restart(self) -> None:
        """Forget all steps: they were counted by optimizers, which no longer count."""
        self._stop_timing()
        self._tally.clear()
        self._phase, self._num_steps, self._busy = self._phase_of(0), 0, None
        self._step_seconds = {phase: [] for phase in Phase}
        if self._is_open:
            self._start_observing()

    def _after_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_manual and threading.get_ident() == self._thread:
            if self._is_open:
                self._optimizers.add(id(optimizer))
            self._advance()

    def _phase_of(self, step: int) -> Phase:
        """Return the phase of a step."""
        if step < self._warm:
            return Phase.WARM
        is_timed = 0 <= step - self._warm - _FIRST_OBSERVED < _TIMED
        return Phase.TIMED if is_timed else Phase.OBSERVED

    def _advance(self) -> None:
        """End a step and start the next."""
        if not self._is_open:
            return
        self._step_seconds[self._phase].append(time.perf_counter() - self._step_begin)
        self._num_steps += 1
        self._step_place = find_place()
        is_last = self._num_steps == self._steps
        coming = self._phase_of(self._num_steps)
        if is_last or coming is not Phase.TIMED:
            self._stop_timing()  # before the commit: stopping waits, and the script is not the cause
        self._tally.commit(self._phase)
        self._where.forget_freed()
        if is_last:
            self.close()
            if self._at_end is not None:
                self._at_end()
            return
        self._enter_phase(coming)
        self._step_begin = time.perf_counter()

    def _enter_phase(self, phase: Phase) -> None:
        """Start or stop observing, as the phase requires; keep observing if that is impossible."""
        if phase is not Phase.TIMED:
            self._start_observing()
        elif self._phase is not Phase.TIMED:
            if not self._stop_observing():
                phase = Phase.OBSERVED
            elif self._where.is_in_use:
                self._profiling.start()
        self._phase = phase

    def _stop_timing(self) -> None:
        self._busy = self._profiling.stop() or self._busy

    def _start_observing(self) -> None:
        if not self._is_observing:
            self._dispatch_watch.__enter__()  # type: ignore[no-untyped-call]
            self._is_observing = True
        if self._where.is_in_use:
            self._warnings.start()

    def _stop_observing(self) -> bool:
        """Stop observing, unless a mode that was entered later is still active; return whether it stopped."""
        if not self._is_observing:
            return True
        if threading.get_ident() != self._thread or not self._dispatch_watch.is_on_top:
            return False
        self._dispatch_watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._is_observing = False
        self._warnings.stop()
        return True

    def _observations(self) -> Observations:
        notes = []
        if self._profiling.reason:
            notes.append(f"The busy time of the GPU was not measured: {self._profiling.reason}.")
        if self._where.is_real and not self._where.is_in_use:
            notes.append("The script did not use the GPU.")
        if len(self._optimizers) > 1 and not self._is_manual:
            notes.append(
                f"{len(self._optimizers)} optimizers take steps, and each step() counts as a step. To count whole"
                " steps, use penstock.doctor.watch() in the script and call its step()."
            )
        return Observations(
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
        faults.append(f"warm: {warm!r} must be a whole number of at least 0")
    elif steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps <= warm):
        faults.append(f"steps: {steps!r} must be a whole number above {warm}, the number of warm-up steps")
    if faults:
        raise UsageError("; ".join(faults))
