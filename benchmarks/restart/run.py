"""Measure how soon a training continues after kill -9, with and without spares; compare with the minimum for torchrun.

python benchmarks/restart/run.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).parent
SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=20.0, help="seconds of training before the kill")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: dict[str, list[float]] = {}
    for number in range(options.rounds):  # in turn, so that load on the machine affects all; one kill per run
        with tempfile.TemporaryDirectory() as folder:
            of_torchrun(Path(folder), options.pause, rows)
        for spares in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                of_ours(Path(folder), options.pause, rows, spares=spares)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    show(rows, options)


def of_torchrun(folder: Path, pause: float, rows: dict[str, list[float]]) -> None:
    met = folder / "met"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    with started([*command, str(HERE / "plain.py"), str(met)]):
        wait_for(lambda: met.exists() and (folder / "process 1").exists())
        time.sleep(pause / 4)
        begin = kill(int((folder / "process 1").read_text()))
        wait_for(lambda: len(met.read_text().splitlines()) > 1)
        rows.setdefault("torchrun: kill to the first collective", []).append(
            float(met.read_text().splitlines()[1]) - begin
        )


def of_ours(folder: Path, pause: float, rows: dict[str, list[float]], *, spares: bool) -> None:
    run = folder / "run"
    words = ["--nproc", "2", "--steps", "1000000", "--log-every", "1", "--checkpoint-every", "5", "--folder", str(run)]
    command = ["-m", "penstock", "train", *words, f"--spares={str(spares).lower()}", "--record-every", "0"]
    with started(command) as process:
        wait_for(lambda: len(events(run, "log")) > 3)
        time.sleep(pause)
        step = events(run, "log")[-1]["step"]
        begin = kill(max(workers(process.pid), key=resident_bytes))
        wait_for(lambda: any(event["time"] > begin and event["step"] > step for event in events(run, "log")))
        name = "Penstock, with spares" if spares else "Penstock, without"
        faults = [json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines()]
        noticed = next(fault["time"] for fault in faults if fault["kind"] == "restart")
        again = next(event for event in events(run, "log") if event["time"] > begin)
        rows.setdefault(f"{name}: kill to the decision to restart", []).append(noticed - begin)
        rows.setdefault(f"{name}: kill to the end of the next step", []).append(again["time"] - begin)
        rows.setdefault(f"{name}: repeated steps", []).append(step - again["step"] + 1)


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def kill(pid: int) -> float:
    begin = time.time()
    os.kill(pid, signal.SIGKILL)
    return begin


def events(run: Path, kind: str) -> list[dict]:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event for event in found if event["event"] == kind]


def workers(pid: int) -> list[int]:
    """Return the processes that a launcher has started. They include spares, which use less memory."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


def show(rows: dict[str, list[float]], options: argparse.Namespace) -> None:
    print(f"{options.rounds} rounds, two processes, torch {torch.__version__}, {platform.machine()}, "
          f"{os.cpu_count()} cores\n")  # fmt: skip
    least = statistics.median(rows["torchrun: kill to the first collective"])
    print("| | median | lowest–highest | ÷ torchrun |\n|---|---|---|---|")
    for name, values in rows.items():
        middle, unit = statistics.median(values), "" if "steps" in name else " s"
        ratio = "" if "steps" in name else f"{middle / least:.2f}"
        print(f"| {name} | {middle:.2f}{unit} | {min(values):.2f}–{max(values):.2f} | {ratio} |")


if __name__ == "__main__":
    main()
