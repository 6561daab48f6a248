"""Spare pool: processes that have done their imports, so that a restart does not wait for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

_torch: Any = api  # the stubs lack the names used here
_MODULE = "penstock.launch.processes.spare_process"
_WORKER = ("-u", "-m", "penstock.launch.worker")


class Spares:
    """The spare processes of a machine, as many as it has training processes.

    They start some seconds after the training, to leave its start alone, and sleep until they are needed.
    """

    def __init__(self, count: int, config: str, *, seconds: float) -> None:
        self._count, self._config, self._seconds = count, config, seconds
        self._due = float("inf")
        self._ready: list[subprocess.Popen[str]] = []

    def note_start(self) -> None:
        """Note that the training processes have just started."""
        self._due = time.monotonic() + self._seconds

    def poll(self) -> None:
        """Start the spare processes when they are due; spares that end are not replaced."""
        if time.monotonic() < self._due:
            return
        self._due = float("inf")
        command = [sys.executable, "-u", "-m", _MODULE, str(os.getpid()), self._config]
        with suppress(OSError):  # without resources for spares, training continues without them
            while len(self._ready) < self._count:
                self._ready.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
                )

    def take(self) -> subprocess.Popen[str] | None:
        """Return a living spare, or None."""
        while self._ready:
            spare = self._ready.pop(0)
            if spare.poll() is None:
                return spare
            _close_input(spare)
        return None

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let torch's agent use spares for the processes that it starts inside."""
        real = _torch.get_subprocess_handler

        def handler(**given: Any) -> SubprocessHandler:  # noqa: ANN401 - as torch's
            spare = self.take()
            return real(**given) if spare is None else _SpareHandler(spare, **given)

        _torch.get_subprocess_handler = handler
        try:
            yield
        finally:
            _torch.get_subprocess_handler = real

    def close(self) -> None:
        """Kill the unused spares."""
        ready, self._ready = self._ready, []
        for spare in ready:
            spare.kill()
        for spare in ready:
            spare.wait()
            _close_input(spare)


class _SpareHandler(SubprocessHandler):
    """Handles a spare that becomes a training process."""

    def __init__(self, spare: subprocess.Popen[str], **given: Any) -> None:  # noqa: ANN401 - as torch's
        self._spare = spare
        super().__init__(**given)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        start = (sys.executable, *_WORKER)
        job = {
            "words": args[len(start) :],
            "env": env,
            "stdout": self._stdout.name if self._stdout else "",
            "stderr": self._stderr.name if self._stderr else "",
        }
        try:
            if args[: len(start)] != start:  # for example if torch binds the process to a NUMA node
                raise OSError
            assert self._spare.stdin is not None
            self._spare.stdin.write(json.dumps(job) + "\n")
            self._spare.stdin.close()
        except OSError:
            self._spare.kill()
            self._spare.wait()
            _close_input(self._spare)
            started: subprocess.Popen[Any] = super()._popen(args, env)
            return started
        return self._spare


def _close_input(spare: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        assert spare.stdin is not None
        spare.stdin.close()
