"""GPU busy: the share of some steps in which the GPU works, from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.devices import cuda

SHORT_SECONDS = 200e-6  # longer than a kernel launch, shorter than other host work


@dataclass(frozen=True)
class Busy:
    """The work of a GPU, from the start of the first kernel to the end of the last."""

    seconds: float  # the whole time
    busy_seconds: float  # the time with at least one kernel or copy running
    num_kernels: int  # the number of kernels and copies
    short_seconds: float = 0.0  # the idle time in gaps so short that launches explain them

    @property
    def idle_seconds(self) -> float:
        """The time with nothing running."""
        return self.seconds - self.busy_seconds


def count_busy(spans: Iterable[tuple[float, float]]) -> Busy | None:
    """Summarise the spans of kernels; spans of several streams may overlap.

    >>> count_busy([(0.0, 1.0), (4.0, 5.0), (0.5, 2.0)])
    Busy(seconds=5.0, busy_seconds=3.0, num_kernels=3, short_seconds=0.0)
    """
    ordered = sorted(spans)
    if not ordered:
        return None
    first = last = ordered[0][0]
    busy = short = 0.0
    for start, end in ordered:
        if 0 < start - last <= SHORT_SECONDS:
            short += start - last
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return Busy(last - first, busy, len(ordered), short)


class Profiling:
    """Records the kernels of the current GPU; `reason` says why it could not."""

    def __init__(self) -> None:
        self._profile: Any = None
        self.reason = ""

    def start(self) -> None:
        """Start, unless another profiler is active: only one can run."""
        if torch.autograd.profiler._is_profiler_enabled:
            self.reason = "another profiler is active"
            return
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)
        try:
            profile.start()
        except RuntimeError as error:
            self.reason = f"torch's profiler failed to start: {str(error).splitlines()[0]}"
            return
        self._profile = profile

    def stop(self) -> Busy | None:
        """Wait until the GPU is idle, stop, and return the result."""
        if self._profile is None:
            return None
        self._profile.stop()
        device = cuda.current_gpu()
        found = count_busy(
            (event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in self._profile.events()
            if event.device_type.name == "CUDA" and event.device_index == device and not event.is_user_annotation
        )
        self._profile = None
        if found is None:
            self.reason = "torch's profiler saw no kernel"
        return found
