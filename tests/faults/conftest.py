"""Nothing is left behind by any test of faults: no process, no thread, no shared memory, no open file."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import processes

_SECONDS = 10.0  # for what was told to end


def children_of(pid):
    """Return the processes that a process has started and that have not ended, zombies with them."""
    found = set()
    with suppress(OSError):  # it is gone
        for task in list(Path(f"/proc/{pid}/task").iterdir()):
            with suppress(OSError):  # a thread that has ended meanwhile
                found |= {int(child) for child in (task / "children").read_text().split()}
    return found


def state():
    """Return what a test may not leave more of."""
    own = os.getpid()
    servers = children_of(own)  # the forkserver and multiprocessing's tracker; what they start counts too
    mine = servers | {grandchild for child in servers for grandchild in children_of(child)}
    return {
        "processes": mine,
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("penstock")},
        "shared memory": {name for name in _shared_memory() if _is_ours(name, {own, *mine})},
        "files": len(os.listdir("/proc/self/fd")),
    }


def _shared_memory():
    return os.listdir("/dev/shm") if Path("/dev/shm").exists() else []


def _is_ours(name, pids):
    """Other tests run beside these, and browsers have memory there too: by our name, or by a pid as torch names it."""
    return name.startswith("penstock") or any(f"_{pid}_" in name for pid in pids)


@pytest.fixture(scope="session")
def warmth():
    """What is started once, and stays."""
    processes.warm()


@pytest.fixture(autouse=True)
def nothing_is_left(warmth):
    """Compare before and after; a process that was told to end has a moment to do so."""
    before = state()
    yield
    end = time.monotonic() + _SECONDS
    while (left := _more(before, state())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def _more(before, after):
    left = {
        name: after[name] - before[name]
        for name in ("processes", "threads", "shared memory")
        if after[name] - before[name]
    }
    if after["files"] > before["files"]:
        left["files"] = after["files"] - before["files"]
    return left
