"""Launched: `penstock train` in a process of its own, from the warm forkserver, and what it did."""

from __future__ import annotations

import json
import multiprocessing
import os
import pty
import resource
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import safe_open

import processes
from penstock.faults.orphans import die_with_parent

JOBS = Path(__file__).with_name("jobs.py")
SECONDS = 120.0


# ---- how it is started


def config(path, **keys):
    """Write a configuration; return its path."""
    given = {
        "model": f"{JOBS}:model", "data": f"{JOBS}:data", "loss": "mse_loss", "steps": 6, "precision": "fp64",
        "micro_batches": 4, "checkpoint_every": 1, "log_every": 1, "timeout": 20.0,
        "spares": False,
        "folder": str(path.parent / "run"),
    } | keys  # fmt: skip
    path.write_text("".join(f"{key} = {_toml(value)}\n" for key, value in given.items() if value is not None))
    return path


def _toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return json.dumps(value)


class Launched:
    """A running `penstock train`.

    Attributes:
        process: of the command itself.
        folder: of the run.
        out: a file with what it prints.
        err: a file with what it says on stderr.
        terminal: the other end of its terminal, where it has one.
    """

    def __init__(self, path, process, terminal):
        self.process, self.terminal = process, terminal
        self.out, self.err = path.with_suffix(".out"), path.with_suffix(".err")
        self.folder = path.parent / "run"
        self.shown = b""

    @property
    def pid(self):
        return self.process.pid

    def wait(self):
        """Return the exit code, when it has ended; what it shows in a terminal is read meanwhile."""
        end = time.monotonic() + SECONDS
        while self.process.is_alive() and time.monotonic() < end:
            self.read()
            self.process.join(0.02)
        assert not self.process.is_alive(), self.told()
        self.read()
        return self.process.exitcode

    def read(self):
        """Take in what a terminal shows."""
        while self.terminal is not None and _is_ready(self.terminal):
            try:
                more = os.read(self.terminal, 1 << 16)
            except OSError:  # the other end is closed
                return
            if not more:
                return
            self.shown += more

    def told(self):
        return self.out.read_text() + self.err.read_text() + self.shown.decode(errors="replace")

    def wait_for(self, is_so, what="something"):
        """Wait until something is so."""
        end = time.monotonic() + SECONDS
        while not is_so():
            self.read()
            assert self.process.is_alive(), f"it ended before {what}: {self.told()}"
            assert time.monotonic() < end, f"no {what} in time: {self.told()}"
            time.sleep(0.01)

    def wait_for_step(self, step):
        """Wait until a step is in the journal."""
        self.wait_for(lambda: any(line["step"] >= step for line in events(self.folder, "log")), f"step {step}")

    def workers(self):
        """Return the processes of the training."""
        return [pid for pid in children(self.process.pid) if is_worker(pid)]

    def spares(self):
        """Return the processes that wait to become some of the training."""
        return [pid for pid in children(self.process.pid) if is_spare(pid)]

    def hang_up(self):
        """Close the terminal, as when a connection is lost."""
        os.close(self.terminal)
        self.terminal = None

    def signal(self, number):
        os.kill(self.process.pid, number)


@contextmanager
def launch(path, *words, terminal=False, limit=None, spare_seconds=None, **environment):
    """Start `penstock train FILE WORDS`; whatever happens, nothing is left of it afterwards."""
    ours, theirs = pty.openpty() if terminal else (None, None)
    name = os.ttyname(theirs) if terminal else None
    process = processes._CONTEXT.Process(target=_enter, args=(path, words, environment, name, limit, spare_seconds))
    process.start()
    made = Launched(path, process, ours)
    try:
        yield made
    finally:
        left = [process.pid, *descendants(process.pid)] if process.is_alive() else []
        for pid in left:
            _kill(pid)
        process.join(10)
        process.close()
        for file in (made.terminal, theirs):
            if file is not None:
                os.close(file)


def train(path, *words, **environment):
    """Run `penstock train` to its end; return its exit code and all that it told."""
    with launch(path, *words, **environment) as made:
        return made.wait(), made.told()


def _enter(path, words, environment, terminal, limit, spare_seconds):
    """Become the command: a session of its own, its output in files or a terminal, its code the exit code."""
    os.setsid()
    die_with_parent()
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was started in the plain way
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    out, err = (os.open(path.with_suffix(end), os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for end in (".out", ".err"))
    source = os.open(os.devnull if terminal is None else terminal, os.O_RDWR)  # the terminal of this session from now
    if terminal is not None:
        out = err = source
    for file, to in ((source, 0), (out, 1), (err, 2)):
        os.dup2(file, to)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "TERM": "xterm"} | environment
    torch.set_num_threads(1)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["penstock", "train", str(path), *map(str, words)]
    from penstock.cli.main import run
    from penstock.launch.processes import agent

    agent._SPARE_SECONDS = agent._SPARE_SECONDS if spare_seconds is None else spare_seconds
    code = 0
    try:
        run()
    except SystemExit as leave:
        code = leave.code or 0
    except BaseException:
        path.with_suffix(".err").write_text(traceback.format_exc())
        code = 1
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---- what it did


def events(folder, event):
    """Return the lines of the journal of a kind."""
    return [line for line in _lines(folder / "events.jsonl") if line["event"] == event]


def faults(folder, kind=None):
    """Return what was written down of faults."""
    return [line for line in _lines(folder / "faults.jsonl") if kind in (None, line["kind"])]


def _lines(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def losses(folder):
    """Return the loss of each step, as it was told last."""
    return {line["step"]: line["loss"] for line in events(folder, "log")}


def newest(folder):
    """Return the complete checkpoint with the highest step."""
    return max(path.parent for path in folder.glob("checkpoint-*/MANIFEST.json"))


def weights(folder):
    """Return the model in the newest checkpoint."""
    found = {}
    for path in sorted(newest(folder).glob("model-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    return found


def is_same(ours, theirs):
    """Return whether two models are the same, bit for bit."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# ---- processes


def children(pid):
    found = set()
    with suppress(OSError):  # it is gone
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):  # a thread that has ended meanwhile
                found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def descendants(pid):
    found = children(pid)
    for child in set(found):
        found |= descendants(child)
    return found


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_worker(pid):
    """Return whether a process is one of a training: it was started as such, or was a spare and has been taken."""
    command = command_of(pid)
    return b"penstock.launch.worker" in command or (
        b"penstock.launch.processes.spare_process" in command and not is_spare(pid)
    )


def is_spare(pid):
    """Return whether a process waits to be told what to do."""
    try:
        waits = Path(f"/proc/{pid}/fd/0").readlink() != Path(os.devnull)
    except OSError:
        return False
    return waits and b"penstock.launch.processes.spare_process" in command_of(pid)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def are_gone(pids, seconds=SECONDS):
    """Return after how many seconds processes are gone."""
    begin = time.monotonic()
    while any(map(is_there, pids)):
        assert time.monotonic() - begin < seconds, f"left: {[pid for pid in pids if is_there(pid)]}"
        time.sleep(0.01)
    return time.monotonic() - begin


def listeners(pids):
    """Return where processes listen for others, by TCP: addresses and ports."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            inodes |= {str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for table, family, size in (("tcp", socket.AF_INET, 4), ("tcp6", socket.AF_INET6, 16)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                raw = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, 2 * size, 8))
                found.add((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def _kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_ready(file):
    return bool(select.select([file], [], [], 0)[0])
