"""Time runs on a GPU with device events around each run, after warm-up runs; format medians and the spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def milliseconds(run: Callable[[], object], *, repeats: int = 10, warm: int = 3) -> list[float]:
    """Return the milliseconds of each run, from when the GPU reaches it until it is done."""
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return found


def spread(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f}–{max(times):.2f})"


def ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(above) / statistics.median(below)
