"""Spares: processes that are ready before they are needed, so that a restart need not wait for imports."""

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

__all__ = ["Spares"]

_torch: Any = api  # which does not say that it has what is taken there
_MODULE = "penstock.launch.processes.spare_process"
_WORKER = ("-u", "-m", "penstock.launch.worker")


class Spares:
    """As many spare processes as a machine has in a training.

    They are started a while after the others, which have the machine to themselves to begin with, and sleep until they
    are needed.

    Args:
        count: how many.
        config: the file that says what is trained.
        seconds: after the others were started.
    """

    def __init__(self, count: int, config: str, *, seconds: float) -> None:
        self._count, self._config, self._seconds = count, config, seconds
        self._due = float("inf")
        self._ready: list[subprocess.Popen[str]] = []

    def note_start(self) -> None:
        """Know that the processes of the training were started just now."""
        self._due = time.monotonic() + self._seconds

    def poll(self) -> None:
        """Start spares, if it is time for them; those that ended are replaced by none."""
        if time.monotonic() < self._due:
            return
        self._due = float("inf")
        command = [sys.executable, "-u", "-m", _MODULE, str(os.getpid()), self._config]
        with suppress(OSError):  # a machine that has no room for them trains without
            while len(self._ready) < self._count:
                self._ready.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)  # noqa: S603
                )

    def take(self) -> subprocess.Popen[str] | None:
        """Return one that lives."""
        while self._ready:
            spare = self._ready.pop(0)
            if spare.poll() is None:
                return spare
            _close_input(spare)
        return None

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Let torch's agent take spares for the processes that it starts inside."""
        real = _torch.get_subprocess_handler

        def handler(**given: Any) -> SubprocessHandler:  # noqa: ANN401 - as torch's
            spare = self.take()
            return real(**given) if spare is None else _Taken(spare, **given)

        _torch.get_subprocess_handler = handler
        try:
            yield
        finally:
            _torch.get_subprocess_handler = real

    def close(self) -> None:
        """Let those go that were not needed."""
        ready, self._ready = self._ready, []
        for spare in ready:
            spare.kill()
        for spare in ready:
            spare.wait()
            _close_input(spare)


class _Taken(SubprocessHandler):
    """A spare that becomes a process of the training."""

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
            if args[: len(start)] != start:  # bound to a part of the machine by torch, say
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
