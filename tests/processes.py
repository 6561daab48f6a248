"""Processes: run a function in several processes that form a process group, from a warm forkserver."""

from __future__ import annotations

import multiprocessing
import os
import traceback
import uuid
from datetime import timedelta

import torch
import torch.distributed as dist

from penstock.faults.orphans import die_with_parent

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch.distributed",
        "torch._dynamo",  # what an export loads takes each process a second
        "torch.export._trace",
        "torch._export.non_strict_utils",
        "penstock.pipeline",
        "penstock.planning.explain.explanation",
        "penstock.model.capture.replayed",
        "penstock.training.trainer",
        "processes",
    ]
)
_STORE = None
_SECONDS = 90


def store():
    """Return the one store of this process; groups use a prefix each, so no test needs a port of its own."""
    global _STORE  # noqa: PLW0603 - made once
    if _STORE is None:
        _STORE = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return _STORE


def start(function, count, *args):
    """Start `function(*args)` in so many processes of a group; return the processes and their pipes."""
    prefix, port = uuid.uuid4().hex, store().port
    started = []
    for rank in range(count):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_enter, args=(function, args, rank, count, port, prefix, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    return started


def finish(started, *, seconds=_SECONDS, may_fail=False):
    """Return what each process returned; raise if one failed, or (with `may_fail`) return its error's text."""
    results = []
    for process, pipe in started:
        try:
            is_fine, result = pipe.recv() if pipe.poll(seconds) else (False, "no answer in time")
        except EOFError:
            process.join(1)
            is_fine, result = False, f"ended with {process.exitcode}"
        if not is_fine and not may_fail:
            for other, _ in started:
                other.kill()
            raise AssertionError(result)
        results.append(result)
    for process, pipe in started:
        process.join(10)
        if process.is_alive():
            process.kill()
            raise AssertionError("a process did not end")
        pipe.close()
    return results


def warm():
    """Start what all groups share: the store, the server that forks, and what multiprocessing itself needs."""
    store()
    process = _CONTEXT.Process(target=os.getpid)
    process.start()
    process.join()
    process.close()


def run(function, count, *args, **kwargs):
    """Run a function in so many processes of a group; return what each returned."""
    return finish(start(function, count, *args), **kwargs)


def _enter(function, args, rank, count, port, prefix, pipe):
    die_with_parent()  # a test run that is killed leaves no process behind
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        base = dist.TCPStore("127.0.0.1", port, is_master=False)
        base.set_timeout(timedelta(seconds=60))
        dist.init_process_group("gloo", store=dist.PrefixStore(prefix, base), rank=rank, world_size=count)
        pipe.send((True, function(*args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
