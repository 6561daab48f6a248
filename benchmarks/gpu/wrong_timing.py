"""Time a large matmul and a tiny kernel in wrong ways and in right ways.

    python benchmarks/gpu/run.py wrong_timing

The script prints the table of docs/howto/timing.md.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from penstock.timing import Measurement, measure

Call = Callable[[], Tensor]


def matmul() -> Call:
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: a @ b


def tiny() -> Call:
    a = torch.randn(1024, device="cuda")
    return lambda: a + 1.0


WORK = {"matmul, 4096 × 4096, bf16": matmul, "a + 1, 1,024 elements": tiny}


# ---- the wrong ways


def without_synchronize(call: Call, count: int = 20) -> Measurement:
    """Read the clock when the host has launched the work, not when the work is done."""
    _warmed(call)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
        torch.cuda.synchronize()  # otherwise the queue fills up and some calls wait
    return Measurement(tuple(times))


def first_run(name: str) -> Measurement:
    """Time the first run in a new process, which also loads kernels, initialises libraries and allocates memory."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
    return Measurement((float(done.stdout.split()[-1]),))


def one_run(call: Call, count: int = 50) -> Measurement:
    """Synchronise before and after one run. This is correct, but includes host time, and single runs vary."""
    _warmed(call)
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return Measurement(tuple(times))


def item_in_the_loop(call: Call, count: int = 50) -> Measurement:
    """Wait in each run, so that no launch overlaps with work; the time also includes reading the result."""
    _warmed(call)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(count):
            call().flatten()[0].item()
        times.append((time.perf_counter() - begin) / count)
    return Measurement(tuple(times))


def events_alone(call: Call, count: int = 50) -> Measurement:
    """Put events around a call with an empty queue: the GPU reaches the first event and then waits for the launch."""
    _warmed(call)
    times = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return Measurement(tuple(times))


def _warmed(call: Call) -> None:
    for _ in range(3):
        call()
    torch.cuda.synchronize()


def run() -> dict[str, dict[str, Measurement]]:
    """Print the table; return its measurements by work and by method."""
    found: dict[str, dict[str, Measurement]] = {}
    for name, make in WORK.items():
        call = make()
        found[name] = {
            "perf_counter, no synchronize": without_synchronize(call),
            "the first run": first_run(name),
            "one run, synchronized (50 tries)": one_run(call),
            "a loop with .item() in it": item_in_the_loop(call),
            "two events, nothing queued before": events_alone(call),
            "`measure(fn)`": measure(call, repeats=20),
            "`measure(fn, host=True)`": measure(call, repeats=20, host=True),
        }
    print(f"| | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for way in next(iter(found.values())):
        print(f"| {way} | {' | '.join(_cell(times[way]) for times in found.values())} |", flush=True)
    return found


def _cell(measured: Measurement) -> str:
    return str(measured).rpartition(",")[0] if len(measured.times) > 1 else str(measured).partition(" (")[0]


def _time_first(name: str) -> None:
    call = WORK[name]()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    print(time.perf_counter() - begin)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(f"{Path(__file__).name} needs a GPU")
    if sys.argv[1:]:
        _time_first(sys.argv[1])
    else:
        run()
