"""A batch of 1.5 MB from a loader's memory to other host memory: by torch's threads, and as `feed` copies it.

    python benchmarks/filling/run.py [--repeats 500]

Between two copies the thread works for a while, as a training loop does. Once on a machine with nothing else to do, and
once with as many other processes at work as there are cores but one, as a loader's workers are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from penstock.runtime.filling import fill

GAPS = (0, 200, 1000, 3000)  # microseconds
BUSY = "while True: pass"


def microseconds(copy: Callable[[int], object], gap: int, repeats: int) -> str:
    """Return the median of many copies, and what nine of ten stay below."""
    times = []
    for number in range(repeats + 50):
        end = time.perf_counter() + gap * 1e-6
        while time.perf_counter() < end:
            pass
        begin = time.perf_counter()
        copy(number)
        times.append(1e6 * (time.perf_counter() - begin))
    times = sorted(times[50:])
    return f"{times[len(times) // 2]:,.0f} (90 %: {times[len(times) * 9 // 10]:,.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=500)
    given = parser.parse_args()
    batches = [torch.randn(128, 3, 32, 32) for _ in range(16)]
    rooms = [torch.empty(128, 3, 32, 32) for _ in range(2)]
    ways = {
        "torch's threads": lambda number: rooms[number % 2].copy_(batches[number % 16]),
        "as feed does": lambda number: fill(rooms[number % 2], batches[number % 16]),
    }
    cores = os.cpu_count() or 1
    print(f"torch {torch.__version__}, {cores} cores, {torch.get_num_threads()} threads; µs a copy")
    print("| other processes | work between, µs | " + " | ".join(ways) + " |\n|---|---|---|---|")
    for others in (0, max(1, cores - 1)):
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(others)]
        try:
            for gap in GAPS:
                found = [microseconds(copy, gap, given.repeats) for copy in ways.values()]
                print(f"| {others} | {gap:,} | " + " | ".join(found) + " |", flush=True)
        finally:
            for process in busy:
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
