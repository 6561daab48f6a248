"""Row 18: a network that parts two processes: each stops by itself, and no two groups write into one folder."""

import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

import processes
from faults.launched import losses, newest
from penstock.errors import HangError, UsageError
from penstock.runtime import processes as company
from penstock.runtime.links import Store
from pipelines import data
from training_runs import make, sequence

pytestmark = pytest.mark.xdist_group("processes")

_SECONDS = 60.0


class Proxy:
    """Passes on what two processes send each other, while its gate is open."""

    def __init__(self, place):
        self.gate, self._place, self._sockets = threading.Event(), place, []
        self.gate.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", int(self._place.read_text())))
            self._sockets += [near, far]
            for source, target in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pass_on, args=(source, target)))
                self._threads[-1].start()

    def _pass_on(self, source, target):
        with suppress(OSError):
            while received := source.recv(1 << 16):
                self.gate.wait()
                target.sendall(received)

    def close(self):
        self._listener.close()
        self.gate.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_SECONDS)
        for one in self._sockets:
            one.close()


class Slow:
    """Batches, each after a moment."""

    def __iter__(self):
        for number in range(200):
            time.sleep(0.03)
            yield data(8, seed=number)


def training_process(folder, steps, place=None, port=None):
    """Train; with a port, as on two machines: lanes find each other by TCP, and lane 1 finds lane 0 at the proxy."""
    if port is not None:
        company._hosts = lambda store, lane, num_lanes: (["one", "two"], "127.0.0.1")
        put = Store.set

        def put_proxy(store, name, text):
            if name == "address/0":
                beside = Path(f"{place}.writing")
                beside.write_text(text.split()[1])
                beside.replace(place)
                text = f"127.0.0.1 {port}"
            put(store, name, text)

        Store.set = put_proxy
    model = sequence(4)
    given = {"model": [model[:4], model[4:]], "analytic": None, "log_every": 1, "view": False, "checkpoint_every": 1}
    trainer, pipe, _ = make(folder, **given, lanes=None, steps=steps, batches=Slow(), keep_checkpoints=99)
    pipe.timeout = 4.0
    try:
        with pipe:
            return trainer.fit().status, trainer.step
    except (HangError, UsageError) as error:
        return f"{type(error).__name__}: {error}", trainer.step


def wait_for(is_so):
    end = time.monotonic() + _SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_network_that_parts_two_processes(tmp_path):
    place, folder = tmp_path / "port", tmp_path / "run"
    proxy = Proxy(place)
    try:
        started = processes.start(training_process, 2, folder, 1000, place, proxy.port)
        wait_for((folder / "checkpoint-000002").exists)
        proxy.gate.clear()  # healed in time: nothing happened
        time.sleep(0.5)
        proxy.gate.set()
        reached = max(losses(folder))
        wait_for(lambda: max(losses(folder)) > reached + 3)
        proxy.gate.clear()
        cut_at = max(losses(folder))
        # another group may not begin while one of this is there: nobody could say whose checkpoints count
        others = processes.run(training_process, 2, folder, 3)
        assert all("UsageError" in told and "another training is running in this folder" in told for told, _ in others)
        told = processes.finish(started)
        assert all("HangError: lane" in text and "has waited 4 s" in text for text, _ in told), told
        assert any("not to be seen from here" in text for text, _ in told)
        ended_at = int(newest(folder).name.removeprefix("checkpoint-"))
        assert ended_at <= cut_at + 1, "a step that was not made by both has no checkpoint"
    finally:
        proxy.close()
    results = processes.run(training_process, 2, folder, ended_at + 3)
    assert results == [("done", ended_at + 3)] * 2
