"""Rendezvous: lets the processes of torchrun find each other, and explains a failure in one line."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from penstock.devices import cuda
from penstock.errors import LostError, UsageError
from penstock.torchrun import attempt

_LEAST_SECONDS = 60.0  # processes of a large job do not all start at once
_LISTENS = "0A"  # the state LISTEN in /proc/net/tcp


def join_processes(timeout_seconds: float) -> None:
    """Join the processes that torchrun started.

    Raises:
        UsageError: if the address is invalid, or if its port is in use.
        LostError: if other processes did not come.
    """
    _check_environment()
    backend = "cpu:gloo,cuda:nccl" if cuda.has_gpu() else "gloo"
    timeout = timedelta(seconds=max(_LEAST_SECONDS, timeout_seconds))
    # torchrun keeps its store when it restarts processes, so the addresses of the old processes are still in it
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store = dist.PrefixStore(f"attempt {attempt()}", store)  # type: ignore[attr-defined]  # it exists
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:  # torch's own errors have these types
        raise _readable_error(error) from None  # torch's many lines would hide the reason


def _check_environment() -> None:
    """Raise at once for faults that torch would report only after a long wait, or in many lines."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port:
        raise UsageError("MASTER_ADDR, MASTER_PORT: not set, so processes cannot find each other: start with torchrun")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"MASTER_PORT: {port!r:.20} is not a port: give a number from 1 to 65535")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"MASTER_ADDR: there is no host {host!r:.80} ({error.strerror}): check its name") from None


def _readable_error(error: Exception) -> UsageError | LostError:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return UsageError(
            f"port {port} of {host} is in use{owner_of_port(int(port))}: set MASTER_PORT to another port, or let "
            "torchrun choose one (--standalone)"
        )
    first = text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
    return LostError(f"the processes did not find each other at {host}:{port}: {first}")


def owner_of_port(port: int) -> str:
    """Return " by process 123 (name)" for the process that listens on a port of this machine; "" if it is unknown."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # the process has ended, or belongs to another user
            for entry in (process / "fd").iterdir():
                with suppress(OSError):
                    if str(entry.readlink()) in sockets:
                        return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _listeners(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
