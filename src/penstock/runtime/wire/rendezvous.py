"""Meeting: how processes that torchrun started find each other, and one line of why they do not."""

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

__all__ = ["join_processes", "owner_of_port"]

_LEAST_SECONDS = 60.0  # processes of a large job do not all start at once
_LISTENS = "0A"  # a state, in /proc/net/tcp


def join_processes(timeout_seconds: float) -> None:
    """Join the processes that torchrun started.

    Raises:
        UsageError: in one line, when the address cannot be one, or its port is taken.
        LostError: in one line, when others did not come.
    """
    _check_environment()
    backend = "cpu:gloo,cuda:nccl" if cuda.has_gpu() else "gloo"
    timeout = timedelta(seconds=max(_LEAST_SECONDS, timeout_seconds))
    # torchrun keeps its store when it starts processes again, and addresses of those before are still in it
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store = dist.PrefixStore(f"attempt {attempt()}", store)  # type: ignore[attr-defined]  # it is there
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:  # torch's own are of these
        raise _readable_error(error) from None  # one line says it all; many would hide it


def _check_environment() -> None:
    """Say at once what torch would say after a long wait, or in many lines."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port:
        raise UsageError("MASTER_ADDR and MASTER_PORT say where processes meet, and are not set: start with torchrun")
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
            f"port {port} of {host} is in use{owner_of_port(int(port))}: give MASTER_PORT another one, or let torchrun "
            "choose (--standalone)"
        )
    first = text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__
    return LostError(f"the processes did not meet at {host}:{port}: {first}")


def owner_of_port(port: int) -> str:
    """Return " by process 123 (name)" for who listens on a port of this machine, as far as it can be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # it has ended, or is another user's
            for entry in (process / "fd").iterdir():
                with suppress(OSError):
                    if str(entry.readlink()) in sockets:
                        return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _listeners(port: int) -> set[str]:
    """Return the inodes of sockets that listen on a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(fields[9])
    return found
