"""Train for half an hour with one fault per minute, and compare the final weights with those of an undisturbed run.

    .venv/bin/python benchmarks/soak/run.py [--minutes 30] [--every 60] [--seed 0]

At random moments, the script kills, stops or interrupts `penstock train` with two processes, or damages a checkpoint.
If the training ends, the script starts it again, as a person or a cluster would. Afterwards it trains the same model
without faults, in threads, to the same step. A run of 30 minutes or more writes results.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).parent
PAUSE_SECONDS = 0.15  # before each batch, in the run with faults
PATIENCE_SECONDS = 120  # the longest wait for a run to end, or to continue
CONFIG = """
model = "{here}/job.py:model"
data = "{here}/job.py:data"
loss = "mse_loss"
steps = {steps}
lr = 1e-3
precision = "fp64"
clip = 1.0
micro_batches = 8
{lanes}
folder = "{folder}"
checkpoint_every = 20
keep_checkpoints = 3
log_every = 20
timeout = 8
max_restarts = 1000
"""


@dataclass
class Soak:
    """A run under faults.

    Attributes:
        folder: the run folder.
        notes: the faults, and the result of each.
    """

    folder: Path
    random: random.Random
    notes: list[dict[str, object]] = field(default_factory=list)
    launcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the training, always with the same command."""
        config = self.folder.parent / "soak.toml"
        config.write_text(CONFIG.format(here=HERE, folder=self.folder, lanes="nproc = 2", steps=10**7))
        log = (self.folder.parent / "soak.log").open("ab")
        environment = os.environ | {"SOAK_PAUSE": str(PAUSE_SECONDS), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "penstock", "train", str(config)]
        self.launcher = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def workers(self) -> list[int]:
        """Return the pids of the training processes."""
        assert self.launcher is not None
        found = subprocess.run(["pgrep", "-P", str(self.launcher.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split() if _is_worker(int(pid))]

    def step(self) -> int:
        """Return the newest step in the journal."""
        try:
            lines = (self.folder / "events.jsonl").read_text().splitlines()
        except OSError:
            return 0
        steps = [json.loads(line).get("step") for line in lines[-20:] if line.endswith("}")]
        return max((step for step in steps if isinstance(step, int)), default=0)

    def wait_for_steps(self) -> bool:
        """Wait until the training continues; return False if it does not."""
        before, end = _num_logs(self.folder / "events.jsonl"), time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            if _num_logs(self.folder / "events.jsonl") > before:
                return True
            assert self.launcher is not None
            if self.launcher.poll() is not None:
                return False
            time.sleep(0.2)
        return False

    def end(self, number: int) -> int | None:
        """Send a signal to the launcher; return its exit code."""
        assert self.launcher is not None
        self.launcher.send_signal(number)
        try:
            return self.launcher.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            return None


# ---- faults


def kill(soak: Soak) -> str:
    """Send SIGKILL to the process of a lane."""
    pid = soak.random.choice(soak.workers())
    os.kill(pid, signal.SIGKILL)
    return "one process killed"


def stop(soak: Soak) -> str:
    """Send SIGSTOP to the process of a lane: it hangs."""
    pid = soak.random.choice(soak.workers())
    os.kill(pid, signal.SIGSTOP)
    return "one process stopped"


def kill_in_a_save(soak: Soak) -> str:
    """Send SIGKILL to the process of a lane while a checkpoint is being written."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if any(soak.folder.glob("tmp-*")):
            os.kill(soak.random.choice(soak.workers()), signal.SIGKILL)
            return "one process killed in a save"
        time.sleep(0.0005)
    os.kill(soak.random.choice(soak.workers()), signal.SIGKILL)
    return "one process killed (no save was seen in 30 s)"


def kill_launcher(soak: Soak) -> str:
    """Send SIGKILL to the launcher; none of its processes may survive."""
    workers = soak.workers()
    assert soak.launcher is not None
    soak.launcher.kill()
    soak.launcher.wait()
    end = time.monotonic() + 10
    while any(map(_is_alive, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    left = sum(map(_is_alive, workers))
    return f"the launcher killed; {left} of {len(workers)} processes left"


def terminate(soak: Soak) -> str:
    """Send SIGTERM, as a cluster does."""
    return f"SIGTERM: exit code {soak.end(signal.SIGTERM)}"


def interrupt(soak: Soak) -> str:
    """Send SIGINT, as Ctrl-C does."""
    return f"Ctrl-C: exit code {soak.end(signal.SIGINT)}"


def flip(soak: Soak) -> str:
    """Kill all processes, then flip one bit of the newest checkpoint."""
    kill_launcher(soak)
    newest = soak.folder / (soak.folder / "latest").read_text().strip()
    path = soak.random.choice(sorted(newest.glob("*.safetensors")))
    content = bytearray(path.read_bytes())
    content[soak.random.randrange(len(content))] ^= 1 << soak.random.randrange(8)
    path.write_bytes(content)
    return "killed, and a bit of the newest checkpoint flipped"


FAULTS: tuple[Callable[[Soak], str], ...] = (kill, stop, kill_in_a_save, kill_launcher, terminate, interrupt, flip)


# ---- the run


def main() -> None:
    """Run, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="folder for the runs; by default a temporary folder")
    given = parser.parse_args()
    base = given.folder or Path(tempfile.mkdtemp(prefix="penstock-soak-"))
    base.mkdir(parents=True, exist_ok=True)
    soak = Soak(base / "soak", random.Random(given.seed))
    begin = time.monotonic()
    soak.start()
    is_up = soak.wait_for_steps()
    print(f"training: {is_up}; {base}", flush=True)
    order: list[Callable[[Soak], str]] = []
    while is_up and time.monotonic() - begin < 60 * given.minutes:
        time.sleep(max(0.0, given.every * soak.random.uniform(0.5, 1.0)))
        if not order:
            order = soak.random.sample(FAULTS, len(FAULTS))
        is_up = suffer(soak, order.pop(), begin)
    code = soak.end(signal.SIGTERM) if is_up else None
    seconds = time.monotonic() - begin
    report = compare(soak, base, seconds, is_up=is_up, code=code, asked=given)
    print(report)
    if given.minutes >= 30:
        (HERE / "results.md").write_text(report)
    sys.exit(0 if "**the same" in report else 1)


def suffer(soak: Soak, fault: Callable[[Soak], str], begin: float) -> bool:
    """Inject a fault and wait until the training continues; return False if it does not."""
    step, at = soak.step(), time.monotonic()
    what = fault(soak)
    assert soak.launcher is not None
    if soak.launcher.poll() is not None:
        soak.start()
    is_up = soak.wait_for_steps()
    took = time.monotonic() - at
    soak.notes.append({"at": at - begin, "step": step, "fault": fault.__name__, "what": what, "seconds": took})
    print(f"{at - begin:7.1f} s  step {step:>6}  {what}; trains again after {took:.1f} s: {is_up}", flush=True)
    return is_up


def compare(soak: Soak, base: Path, seconds: float, *, is_up: bool, code: int | None, asked: argparse.Namespace) -> str:
    """Train the same model without faults; return the report."""
    newest = soak.folder / (soak.folder / "latest").read_text().strip()  # one with a higher number may be damaged
    step = int(newest.name.removeprefix("checkpoint-"))
    config = base / "reference.toml"
    config.write_text(CONFIG.format(here=HERE, folder=base / "reference", lanes="lanes = 2", steps=step))
    command = [sys.executable, "-m", "penstock", "train", str(config)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    ours, wanted = weights_of(newest), weights_of(base / "reference" / newest.name)
    worst = max(float((ours[name] - wanted[name]).abs().max()) for name in wanted)
    is_same = ours.keys() == wanted.keys() and worst <= 1e-10
    counts = Counter(str(note["fault"]) for note in soak.notes)
    times = sorted(float(str(note["seconds"])) for note in soak.notes)
    lines = [
        "# The last soak",
        "",
        f"Last run: {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {version('torch')}; seed {asked.seed}.",
        "",
        f"- {seconds / 60:.1f} minutes, {len(soak.notes)} faults: "
        + ", ".join(f"{count} × {name}" for name, count in sorted(counts.items())),
        f"- training continued after each fault: {'yes' if is_up else '**no**'}"
        + (
            f"; from a fault to the next line of the log, about 20 steps later: {times[0]:.1f} to {times[-1]:.1f} s"
            if times
            else ""
        ),
        f"- ended by SIGTERM at step {step} with exit code {code}",
        f"- weights of step {step}, compared with those of an undisturbed run in threads: "
        + (f"**the same**, largest difference {worst:.1e} (float64)" if is_same else f"**different** by {worst:.1e}"),
        "",
        "| at, s | step | fault | training continued after, s |",
        "|---|---|---|---|",
        *(f"| {n['at']:.0f} | {n['step']} | {n['what']} | {n['seconds']:.1f} |" for n in soak.notes),
        "",
    ]
    return "\n".join(lines)


def weights_of(folder: Path) -> dict[str, object]:
    """Return the tensors of the model in a checkpoint."""
    found: dict[str, object] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    return found


def _num_logs(path: Path) -> int:
    try:
        return path.read_bytes().count(b'"event": "log"')
    except OSError:
        return 0


def _is_worker(pid: int) -> bool:
    """Return whether a process takes part in the training; a spare process does once it is in use."""
    command = _command_of(pid)
    if "penstock.launch.processes.spare_process" not in command:
        return "penstock.launch.worker" in command
    try:
        return Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
    except OSError:
        return False


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


if __name__ == "__main__":
    main()
