"""Launcher: start a training in several processes with torchrun's elastic agent, and return its exit code."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import OutputError, UsageError
from penstock.launch.config.config_checks import node_counts
from penstock.launch.config.config_writer import to_toml
from penstock.launch.processes.exit_codes import DONE, INTERRUPTED, LOST, RAISED

if TYPE_CHECKING:
    from penstock.launch.config.config import Config
    from penstock.launch.config.config_reader import LoadedConfig
    from penstock.launch.processes.agent import Agent
    from penstock.launch.processes.process_logs import Show

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STORE_SECONDS = 5.0  # to wait for a store of torch


def needs_processes(config: Config) -> bool:
    """Return whether a training runs in several processes."""
    return (config.nproc or 1) > 1 or node_counts(config)[1] > 1


def start_processes(given: LoadedConfig, *, show: Show = "drawn", again: str | None = None) -> int:
    """Start processes, watch them until the training ends, and return its exit code.

    The command `again` resumes the training; the summary names it if the training ends early. A folder in use, or a
    rendezvous endpoint that cannot be used, raises a UsageError.
    """
    config = given.config
    is_one = node_counts(config)[1] == 1
    if config.rdzv_endpoint is not None:
        check_endpoint(config.rdzv_endpoint, is_shared=not is_one)
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from penstock.launch.processes.agent import LeaveNow, make_agent
    from penstock.launch.processes.process_logs import Follower, RunLogs, quiet_torch
    from penstock.training.resume.run_folder import RunFolder

    if is_one:
        with RunFolder(config.folder, is_first=True):
            pass  # find out now whether another training uses it, before processes start
    folder = _make(Path(config.log_dir or Path(config.folder) / "logs"))
    path = folder / f"config-{socket.gethostname()}-{os.getpid()}.toml"
    path.write_text(to_toml(given))
    quiet_torch(folder / f"launcher-{socket.gethostname()}.log")
    # the agent handles the other signals, since torch would not wait for a save
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (config.nproc or 1))))
    try:
        with Follower() as follower:
            agent = make_agent(config, path, RunLogs(folder, follower, show=show), again, _say)
            with _handling(agent):
                return _code(agent, agent.run())
    except LeaveNow as leave:
        return leave.code
    except RendezvousError as error:
        where = config.rdzv_endpoint or "localhost"
        _say(
            f"Error: the rendezvous at {where} failed: {error} Its machine must be reachable during the whole training"
        )
        return LOST
    finally:
        path.unlink(missing_ok=True)


def _say(text: str) -> None:
    with suppress(OSError):  # a closed terminal must not end the training
        sys.stdout.flush()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be created: {error.strerror}") from error
    return folder


@contextmanager
def _handling(agent: Agent) -> Iterator[None]:
    """Let the agent handle signals inside."""
    before = {number: signal.signal(number, agent.on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(agent: Agent, result: Any) -> int:  # noqa: ANN401 - torch's RunResult, or None
    if result is None or not result.is_failed():  # None: the other machines ended the training
        return DONE
    if agent.verdict is None:
        return RAISED
    if not agent.verdict.is_reported and agent.verdict.code not in (DONE, INTERRUPTED):
        _say(f"Error: {agent.verdict.why}")
    return agent.verdict.code


# ---- the endpoint of the rendezvous


def check_endpoint(endpoint: str, *, is_shared: bool) -> None:
    """Check that a rendezvous at the endpoint is possible.

    Args:
        endpoint: HOST:PORT.
        is_shared: whether other machines or launchers use the endpoint too; then its store may be running already.

    Raises:
        UsageError: if the host is unknown or another program uses the port.
    """
    host, port = _parts(endpoint)
    try:
        places = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise UsageError(f"rdzv_endpoint: there is no host {host!r}: {error.strerror}") from error
    if not port or not any(_is_here(str(place)) for place in places):
        return
    with socket.socket(socket.AF_INET6 if all(":" in str(place) for place in places) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return
        except OSError as error:
            reason = error.strerror
    if is_shared and _is_store(host, port):
        return
    from penstock.runtime.wire.rendezvous import owner_of_port

    raise UsageError(
        f"rdzv_endpoint: port {port} is in use{owner_of_port(port)} ({reason}); use another port, or leave the key out "
        "to use a free one"
    )


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":") if endpoint.rpartition(":")[2].isdecimal() else (endpoint, "", "29400")
    return host.strip("[]"), int(port)


def _is_here(address: str) -> bool:
    """Return whether an address belongs to this machine: only such addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_store(host: str, port: int) -> bool:
    """Return whether a store of torch answers there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in the stubs

    try:
        with socket.create_connection((host, port), _STORE_SECONDS):
            pass
        TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS), wait_for_workers=False)
    except (OSError, RuntimeError):
        return False
    return True
