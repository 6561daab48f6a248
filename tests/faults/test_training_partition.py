"""Row 18: a network that parts two processes: each stops by itself, and no two groups write into one folder."""

import errno
import fcntl
import socket
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import processes
from faults.launched import losses, newest
from penstock.errors import HangError, UsageError
from penstock.runtime.lanes import process_lanes as lane_group
from penstock.runtime.wire.sockets import Store
from penstock.training.resume.run_folder import RunFolder
from pipelines import data
from training_runs import Noted, make, sequence

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


def training_process(folder, steps, place=None, port=None, go=None):
    """Train, when there is a file `go`, if one is named.

    With a port, as on two machines: lanes find each other by TCP, and lane 1 finds lane 0 at the proxy.
    """
    if port is not None:
        lane_group._hosts = lambda store, lane, num_lanes: (["one", "two"], "127.0.0.1")
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
    if go is not None:
        Path(f"{go}.{pipe.lanes[0]}").touch()
        wait_for(go.exists)
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
        go = tmp_path / "go"
        waiting = processes.start(training_process, 2, folder, 3, None, None, go)
        wait_for(lambda: all(Path(f"{go}.{lane}").exists() for lane in range(2)))
        proxy.gate.clear()
        cut_at = max(losses(folder))
        # another group may not begin while one of this is there: nobody could say whose checkpoints count
        go.touch()
        others = processes.finish(waiting)
        assert all("UsageError" in told and "another training is running in this folder" in told for told, _ in others)
        told = processes.finish(started)
        assert all("HangError: lane" in text and "has waited 4 s" in text for text, _ in told), told
        assert any("not visible from here" in text for text, _ in told)
        ended_at = int(newest(folder).name.removeprefix("checkpoint-"))
        assert ended_at <= cut_at + 1, "a step that was not made by both has no checkpoint"
    finally:
        proxy.close()
    results = processes.run(training_process, 2, folder, ended_at + 3)
    assert results == [("done", ended_at + 3)] * 2


class Taken(Noted):
    """Lets another training take the folder after the third step, as one on the other side of a cut would."""

    strict = True

    def __init__(self, path):
        super().__init__()
        self.other = RunFolder(path, is_first=True)

    def on_step_end(self, trainer, reading):
        super().on_step_end(trainer, reading)
        if reading.step == 3 and trainer.is_first:
            self.other.take()


def lose_the_folder(folder, lanes=None):
    """Train in a folder without locks that another training takes; return what is said, and the steps made."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    real, fcntl.flock = fcntl.flock, flock
    try:
        taken = Taken(folder)
        model = sequence(4)
        trainer, pipe, _ = make(
            folder, lanes=lanes, model=[model[:4], model[4:]], analytic=None, callbacks=[taken], checkpoint_every=1,
            view=False,
        )  # fmt: skip
        with pipe, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                trainer.fit()
                told = "no error"
            except UsageError as error:
                told = str(error)
        assert any("has no locks" in str(one.message) for one in warned) == trainer.is_first
        assert not taken.other.why_lost()  # who has it keeps it
        taken.other.release()
    finally:
        fcntl.flock = real
    return told, sorted(taken.losses)


def test_who_has_lost_the_folder_saves_nothing_more_and_stops(tmp_path):
    for folder, ends in (
        (tmp_path / "threads", [lose_the_folder(tmp_path / "threads", lanes=2)]),
        (tmp_path / "processes", processes.run(lose_the_folder, 2, tmp_path / "processes")),
    ):
        for told, steps in ends:
            assert "another training has taken over this folder (process " in told
            assert steps == [1, 2, 3]
        assert newest(folder).name in ("checkpoint-000001", "checkpoint-000002")  # where 2 was not yet complete
