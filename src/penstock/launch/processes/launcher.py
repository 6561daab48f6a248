"""Launcher: start a training in several processes with torchrun's elastic agent, and return its exit code."""

from __future__ import annotations

import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import OutputError, UsageError
from penstock.launch.config.config_checks import node_counts
from penstock.launch.config.config_writer import to_toml
from penstock.launch.processes.exit_codes import DONE, INTERRUPTED, LOST, RAISED
from penstock.launch.processes.ports import check_endpoint
from penstock.launch.processes.worker_process import COMMAND_FLAG, PARENT_FLAG, RESOLVED_FLAG

if TYPE_CHECKING:
    from penstock.launch.config.config import Config
    from penstock.launch.config.config_reader import LoadedConfig
    from penstock.launch.processes.agent import Agent
    from penstock.launch.processes.process_logs import RunLogs, Show

_UNLIMITED = 1 << 20  # restarts of torch's agent: `Policy` limits them per hour
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def needs_processes(config: Config) -> bool:
    """Return whether a training runs in several processes."""
    return (config.nproc or 1) > 1 or node_counts(config)[1] > 1


def start_processes(given: LoadedConfig, *, show: Show = "drawn", again: str | None = None) -> int:
    """Start processes, watch them until the training ends, and return its exit code.

    Args:
        given: the configuration.
        show: what the first process shows: a view "drawn" in a terminal, "lines", or "nothing".
        again: the command that resumes the training, for the summary if it ends early.

    Raises:
        UsageError: if the folder is in use, or the rendezvous endpoint cannot be used.
    """
    config = given.config
    is_one = node_counts(config)[1] == 1
    if config.rdzv_endpoint is not None:
        check_endpoint(config.rdzv_endpoint, is_shared=not is_one)
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from penstock.launch.processes.agent import LeaveNow
    from penstock.launch.processes.process_logs import Follower, RunLogs, quiet_torch
    from penstock.training.resume.run_folder import RunFolder

    if is_one:
        with RunFolder(config.folder, is_first=True):
            pass  # find out now whether another training uses it, before processes start
    folder = _make(Path(config.log_dir or Path(config.folder) / "logs"))
    path = folder / f"config-{socket.gethostname()}-{os.getpid()}.toml"
    path.write_text(to_toml(given))
    quiet_torch(folder / f"launcher-{socket.gethostname()}.log")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = (
        "SIGQUIT"  # the agent handles the others, since torch would not wait for a save
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // (config.nproc or 1))))
    try:
        with Follower() as follower:
            agent = _agent(config, path, RunLogs(folder, follower, show=show), again)
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


def _agent(config: Config, path: Path, logs: RunLogs, again: str | None) -> Agent:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import registry
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from penstock.launch.processes.agent import Agent
    from penstock.launch.processes.loopback import HOST, loopback_handler
    from penstock.launch.processes.restart_policy import Policy

    fewest, most = node_counts(config)
    is_static = config.rdzv_backend == "static"
    settings: dict[str, Any] = {"timeout": 900, **config.rdzv_conf}
    if is_static:
        settings["rank"] = config.node_rank
    is_ours = most == 1 and config.rdzv_endpoint is None and config.rdzv_backend == "c10d"
    endpoint = config.rdzv_endpoint or f"{HOST}:0"
    local = HOST if most == 1 else None
    name = config.rdzv_id or uuid.uuid4().hex
    try:
        parameters = RendezvousParameters(config.rdzv_backend, endpoint, name, fewest, most, local, **settings)
        handler = loopback_handler(parameters) if is_ours else registry.get_rendezvous_handler(parameters)
    except (ValueError, ImportError, TypeError) as error:
        raise UsageError(f"rdzv: {error}") from error
    if is_ours:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    address, port = parse_rendezvous_endpoint(endpoint, default_port=29400) if is_static else (None, None)
    words = [RESOLVED_FLAG, f"{PARENT_FLAG}={os.getpid()}", *([] if again is None else [f"{COMMAND_FLAG}={again}"])]
    spec = WorkerSpec(
        role="penstock",
        local_world_size=config.nproc or 1,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=("-u", "-m", "penstock.launch.worker", str(path), *words),
        max_restarts=_UNLIMITED,
        monitor_interval=0.05,
        master_addr=address,
        master_port=port,
        local_addr=local,
    )
    return Agent(
        spec,
        logs,
        policy=Policy(config.max_restarts),
        folder=Path(config.folder),
        grace_seconds=config.grace_seconds,
        say=_say,
        config=path if config.spares and config.max_restarts else None,
    )


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
    if result is None:  # the other machines ended the training
        return DONE
    if not result.is_failed():
        return DONE
    if agent.verdict is None:
        return RAISED
    if not agent.verdict.is_reported and agent.verdict.code not in (DONE, INTERRUPTED):
        _say(f"Error: {agent.verdict.why}")
    return agent.verdict.code
