"""Agent: torchrun's agent with Penstock's rules for the rendezvous, for restarts and for processes that hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous import registry
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from penstock.errors import UsageError
from penstock.launch.config.config_checks import node_counts
from penstock.launch.processes.exit_codes import DONE, INTERRUPTED, LATE, Policy, Verdict
from penstock.launch.processes.process_logs import RunLogs
from penstock.launch.processes.spare_pool import Spares
from penstock.launch.processes.worker_process import AGAIN_FLAG, COMMAND_FLAG, PARENT_FLAG, RESOLVED_FLAG
from penstock.runtime.lanes.hang_report import state_of
from penstock.training.resume.run_folder import RunFolder

if TYPE_CHECKING:
    from penstock.launch.config.config import Config

_PATIENCE_SECONDS = 2.0  # for the other processes to end after one failed; they notice it at once, unless they hang
_INTERVAL_SECONDS = 0.05
_STOPPED_LOOKS, _POLL_SECONDS = 10, 1.0  # a process that is stopped in this many looks in a row is reported
_SPARE_SECONDS = 10.0  # by then the training has started, and the imports of spare processes do not disturb it
_UNLIMITED = 1 << 20  # restarts of torch's agent: `Policy` limits them per hour
_HOST = "127.0.0.1"
_WAITING = 128  # maximum number of pending connections


class LeaveNow(BaseException):
    """A second signal arrived: leave without waiting."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Agent(LocalElasticAgent):
    """Starts and watches the processes of this machine, and restarts them if a retry can help.

    With `config`, the path of the configuration, it keeps spare processes ready for a restart.
    """

    def __init__(
        self, spec: WorkerSpec, logs: RunLogs, *, policy: Policy, folder: Path, grace_seconds: float,
        say: Callable[[str], None], config: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, logs, exit_barrier_timeout=grace_seconds, shutdown_timeout=max(1, int(grace_seconds)))
        self._policy, self._faults, self._grace, self._say = policy, folder / "faults.jsonl", grace_seconds, say
        self.signal_name: str | None = None
        self.verdict: Verdict | None = None
        self._signalled_at = self._looked_at = 0.0
        self._num_stopped: dict[int, int] = {}  # number of consecutive looks at which a process was stopped
        self._num_read = self._size()
        self._spares = Spares(0 if config is None else spec.local_world_size, str(config), seconds=_SPARE_SECONDS)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the training until it ends."""
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            self._spares.close()

    # ---- signals

    def on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of handlers
        """Pass the first signal on to the processes, so that they save; leave at the second signal."""
        name = signal.Signals(number).name
        if self.signal_name is not None or not self._running():
            if self.signal_name is None:
                begun = ": the last checkpoint is kept" if self.verdict else " before the first step: nothing to save"
                self._say(f"{name}{begun}")
            self._signal(signal.SIGKILL)
            # no process had started the training, so there is nothing to save
            raise LeaveNow(INTERRUPTED if number == signal.SIGINT else DONE if self.signal_name is None else LATE)
        self.signal_name, self._signalled_at = name, time.monotonic()
        again = "; press Ctrl-C again to leave at once" if number == signal.SIGINT else ""
        self._say(f"{name}: the current step is finished and saved{again}")
        self._signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running().values():
            process.send_signal(number)

    def _processes(self) -> dict[int, Any]:
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {local: handler.proc for local, handler in context.subprocess_handlers.items()}

    def _running(self) -> dict[int, Any]:
        return {local: process for local, process in self._processes().items() if process.poll() is None}

    # ---- watching

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._spares.taking():
            started: dict[int, Any] = super()._start_workers(worker_group)
        self._spares.note_start()
        return started

    def _look_for_stopped(self, worker_group: WorkerGroup) -> None:
        """Report a stopped process: the others may wait for it, and cannot find out before the rendezvous."""
        if time.monotonic() < self._looked_at + _POLL_SECONDS:
            return
        self._looked_at = time.monotonic()
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        for local, process in self._running().items():
            state = state_of(process.pid)
            self._num_stopped[local] = self._num_stopped.get(local, 0) + 1 if " is stopped " in state else 0
            if self._num_stopped[local] == _STOPPED_LOOKS:
                self._say(f"lane {ranks[local]}: {state}; the others wait for it, at most for `timeout` seconds")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._spares.poll()
        self._look_for_stopped(worker_group)
        ended = {code for process in self._processes().values() if (code := process.poll()) is not None}
        stuck: list[int] = []
        if self.signal_name is not None:
            stuck = self._wait(self._signalled_at + self._grace)
        elif ended - {DONE}:
            is_polite = ended <= {DONE, INTERRUPTED}
            stuck = self._wait(time.monotonic() + (self._grace if is_polite else _PATIENCE_SECONDS))
        codes = {local: process.poll() for local, process in self._processes().items()}
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
            exits = {ranks[local]: code for local, code in codes.items() if code is not None and local not in stuck}
            self._decide(exits, [ranks[local] for local in stuck])
        return result

    def _wait(self, end: float) -> list[int]:
        """Wait for all processes; kill those that do not end in time, and return them."""
        while self._running() and time.monotonic() < end:
            time.sleep(_INTERVAL_SECONDS)
        stuck = self._running()
        for process in stuck.values():
            process.kill()
            process.wait()
        return list(stuck)

    def _decide(self, exits: dict[int, int], stuck: list[int]) -> None:
        faults = self._new_faults()
        verdict = self._policy.judge(exits, faults, now=time.monotonic(), signal_name=self.signal_name, stuck=stuck)
        self.verdict = verdict
        attempt = self._worker_group.spec.max_restarts - self._remaining_restarts
        note = {
            "kind": "restart" if verdict.is_again else "give up",
            "attempt": attempt,
            "exits": {str(rank): code for rank, code in exits.items()},
            "stuck": stuck,
            "message": verdict.why,
            "code": verdict.code,
        }
        self._write(note)
        if not verdict.is_again:
            self._remaining_restarts = 0
            return
        wait = f" in {verdict.seconds:g} s" if verdict.seconds else ""
        self._say(f"{verdict.why}: all processes restart{wait}, from the last checkpoint")
        end = time.monotonic() + verdict.seconds
        while time.monotonic() < end:
            time.sleep(_INTERVAL_SECONDS)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # a new store for each attempt: processes must not find the addresses of earlier ones
        handler = worker_group.spec.rdzv_handler
        for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if hasattr(handler, name):
                setattr(handler, name, None)
        super()._rendezvous(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec = worker_group.spec
        if AGAIN_FLAG not in spec.args:
            spec.args = (*spec.args, AGAIN_FLAG)
        super()._restart_workers(worker_group)
        self._num_read = self._size()

    # ---- faults.jsonl

    def _size(self) -> int:
        return self._faults.stat().st_size if self._faults.exists() else 0

    def _new_faults(self) -> list[dict[str, Any]]:
        """Return the faults that the processes of this attempt wrote."""
        if not self._faults.exists():
            return []
        with self._faults.open("rb") as file:
            file.seek(self._num_read)
            lines = file.read().splitlines()
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except ValueError:  # an incomplete line of a process that was killed
                continue
        return [fault for fault in found if isinstance(fault, dict)]

    def _write(self, note: dict[str, Any]) -> None:
        try:
            RunFolder(self._faults.parent, is_first=False).append(self._faults.name, note)
        except OSError as error:
            self._say(f"Warning: {self._faults} cannot be written: {error.strerror}")


def make_agent(config: Config, path: Path, logs: RunLogs, again: str | None, say: Callable[[str], None]) -> Agent:
    """Return the agent of this machine for a configuration, which is in the file `path` too."""
    fewest, most = node_counts(config)
    is_static = config.rdzv_backend == "static"
    settings: dict[str, Any] = {"timeout": 900, **config.rdzv_conf}
    if is_static:
        settings["rank"] = config.node_rank
    is_ours = most == 1 and config.rdzv_endpoint is None and config.rdzv_backend == "c10d"
    endpoint = config.rdzv_endpoint or f"{_HOST}:0"
    local = _HOST if most == 1 else None
    name = config.rdzv_id or uuid.uuid4().hex
    try:
        parameters = RendezvousParameters(config.rdzv_backend, endpoint, name, fewest, most, local, **settings)
        handler = _loopback_handler(parameters) if is_ours else registry.get_rendezvous_handler(parameters)
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
        say=say,
        config=path if config.spares and config.max_restarts else None,
    )


def _loopback_handler(parameters: RendezvousParameters) -> DynamicRendezvousHandler:
    """Return a c10d rendezvous whose stores listen on the loopback interface only, where other machines reach none.

    The store of torch listens on all interfaces unless it gets a socket that is already listening.
    """
    store = _store()
    handler = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    handler._create_tcp_store_server = lambda *_: _store()  # type: ignore[method-assign]  # one store per attempt
    return handler


def _store() -> Any:  # noqa: ANN401 - torch's store
    with socket.socket() as listening:
        listening.bind((_HOST, 0))
        listening.listen(_WAITING)
        port = listening.getsockname()[1]
        number = listening.detach()  # the store owns the socket from now on
    return TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=number)
