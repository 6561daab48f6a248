"""penstock train in processes: the same losses as in threads, whatever is killed, stopped or told to end on the way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import processes
from faults.launched import is_spare, is_worker
from penstock.cli.main import app
from penstock.errors import UsageError
from penstock.launch.build.trainer_builder import build_trainer
from penstock.launch.config.config_reader import read_config
from penstock.launch.processes.launcher import check_endpoint

COMMAND = str(Path(sys.executable).parent / "penstock")
SMALL = """
steps = 40
spares = false
log_every = 1
micro_batches = 4
clip = 1.0
checkpoint_every = 5
timeout = 10.0
model = "own_of_tests.py:model"
data = "own_of_tests.py:data"
loss = "mse_loss"
"""
OWN = """
import time
import torch
from torch import nn


def model():  # a sequence needs no capture: processes are there sooner
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


def data(stuck_after=None):
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, generator=drawn) for _ in range(7)]

    class Data:
        def __iter__(self):
            for number, batch in enumerate(batches):
                if number == stuck_after:
                    time.sleep(3600)
                yield batch, batch.sum(1, keepdim=True)

    return Data()
"""
SECONDS = 150  # that anything may take, on a machine that is busy


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Be in a folder with a small configuration; what was started is gone at the end, and nothing of it is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Path("run.toml").write_text(SMALL)
    Path("own_of_tests.py").write_text(OWN)
    yield tmp_path
    wait_for(lambda: not workers(tmp_path) and not workers(tmp_path, is_spare))


def workers(place, is_one=is_worker):
    """Return the processes that work for a launcher of this test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            is_here = path.readlink() == place
        except OSError:
            continue
        if is_here and is_one(pid := int(path.parent.name)):
            found.append(pid)
    return found


def wait_for(happened, seconds=SECONDS, process=None):
    end = time.monotonic() + seconds
    while not (found := happened()):
        assert time.monotonic() < end, "it did not happen in time"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    return found


def events(folder="run"):
    path = Path(folder, "events.jsonl")
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]  # the last may be half written


def losses(folder="run"):
    """Return the loss of each step; the last that was told, where a step was run again."""
    return {event["step"]: event["loss"] for event in events(folder) if event["event"] == "log"}


@contextmanager
def started(*words, **environment):
    """Start the command; kill it at the end, if it is still there."""
    process = subprocess.Popen(
        [COMMAND, "train", "run.toml", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finished(*words, **environment):
    """Run the command to its end; return its code and what it said."""
    with started(*words, **environment) as process:
        out, err = process.communicate(timeout=SECONDS)
        return process.returncode, out, err


def has_step(number, folder="run"):
    return lambda: any(event["event"] == "log" and event["step"] >= number for event in events(folder))


def has_begun(lanes, then="train_begin"):
    """Return whether the last that has begun has so many lanes, and something has happened since."""
    told = events()
    begun = [number for number, event in enumerate(told) if event["event"] == "train_begin"]
    if not begun or told[begun[-1]]["plan"]["lanes"] != lanes:
        return False
    return any(event["event"] == then for event in told[begun[-1] :])


def test_processes_that_are_killed_or_hang_are_started_again_and_nothing_changes(place):
    """Row 1 and 3: kill -9 in the middle of a step, then SIGSTOP; the losses are those of threads left alone."""
    faults = "kill@lane=1,step=20,action=B1; stop@lane=0,step=35,action=F2,attempt=1"
    secret = {"A_SECRET_OF_TESTS": "canary-7f3a"}
    code, out, err = finished("--nproc", "2", "--timeout", "3", PENSTOCK_FAULTS=faults, **secret)
    assert code == 0, err
    assert "process 1 was killed by SIGKILL: all processes restart" in err
    assert "lane 1 has waited 3 s" in err
    assert "process 0 did not end by itself and was killed: all processes restart in 1 s" in err
    assert "Done: 40 of 40 steps" in out
    begun = [event["step"] for event in events() if event["event"] == "train_begin"]
    assert len(begun) == 3
    assert begun[1] in (10, 15)  # a save waits for the one before, and the last may not have been complete
    assert begun[2] in (25, 30)
    notes = [json.loads(line) for line in Path("run/faults.jsonl").read_text().splitlines()]
    assert [note["kind"] for note in notes if note["kind"] in ("restart", "give up")] == ["restart", "restart"]
    assert {path.name for path in Path("run/logs").iterdir()} >= {"attempt_0", "attempt_1", "attempt_2"}
    assert "step" in Path("run/logs/attempt_0/0/stdout.log").read_text()
    for path in Path("run").rglob("*"):  # no secret of the environment is in any file
        assert not path.is_file() or b"canary-7f3a" not in path.read_bytes(), path
    result = CliRunner().invoke(app, ["train", "run.toml", "--folder", "threads", "--quiet"])
    assert result.exit_code == 0, result.stderr
    assert losses() == pytest.approx(losses("threads"), rel=1e-6)
    assert sorted(losses()) == list(range(1, 41))


def test_a_scheduler_that_ends_it_and_a_keyboard_that_does(place):
    """Row 24 and 27: SIGTERM saves and is no failure; so does Ctrl-C; threads go on where processes were."""
    with started("--nproc", "2", "--steps", "100000") as process:
        wait_for(has_step(2), process=process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    last = events()[-1]
    assert (last["event"], last["status"]) == ("train_end", "SIGTERM")
    assert Path("run", f"checkpoint-{last['step']:06d}", "MANIFEST.json").exists()
    with started("--lanes", "3", "--steps", "100000") as process:
        wait_for(has_step(last["step"] + 2), process=process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert f"continues from the checkpoint of step {last['step']}" in out
    assert Path("run", f"checkpoint-{events()[-1]['step']:06d}", "MANIFEST.json").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [(), ("--nproc", "2")], ids=["threads", "processes"])
def test_a_keyboard_that_means_it(place, words):
    """Row 24 and 26: Ctrl-C twice leaves at once, and nobody is left behind."""
    with started("--steps", "100000", *words) as process:
        wait_for(has_step(2), process=process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        wait_for(lambda: not workers(place), 10)


def listening(pids):
    """Return the addresses that processes listen at, as the kernel writes them."""
    sockets = set()
    for link in (link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):  # closed by now
            sockets.add(str(link.readlink()))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_a_launcher_that_is_killed_leaves_nobody(place):
    """Row 25 and 30: nor does anybody listen where other machines could come in."""
    with started("--nproc", "2", "--steps", "100000") as process:
        wait_for(has_step(1), process=process)
        assert len(workers(place)) == 2
        assert listening([process.pid, *workers(place)]) == {"0100007F"}  # 127.0.0.1
        process.kill()
        process.wait()
        wait_for(lambda: not workers(place), 10)


def test_what_user_code_raises_and_lost_processes_without_restarts(place):
    """Row 2 and 22: an error that would happen again is told once, and not tried again; a lost process is 137."""
    code, _, err = finished("--nproc", "2", PENSTOCK_FAULTS="raise@lane=1,step=3,action=F1")
    assert code == 1, err
    assert err.count("Traceback") == 1
    assert "started again" not in err
    assert len([event for event in events() if event["event"] == "train_begin"]) == 1
    faults = "kill@lane=0,step=5,action=F1"
    words = ("--nproc", "2", "--max-restarts", "0", "--folder", "lost", "--json")
    code, out, err = finished(*words, PENSTOCK_FAULTS=faults)
    assert code == 137, err
    assert json.loads(out)["code"] == 137
    assert "Error: process 0 was killed by SIGKILL; restarts in the last hour: 0 of 0" in err


def test_ports_and_hosts_that_are_not_ours(place):
    """Row 17: a line that says who has the port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = finished("--nproc", "2", "--rdzv-endpoint", f"localhost:{port}")
        assert code == 2
        assert f"rdzv_endpoint: port {port} is in use by process {os.getpid()}" in err
        assert err.count("\n") == 1
    with pytest.raises(UsageError, match=r"there is no host 'no\.such\.host\.invalid'"):
        check_endpoint("no.such.host.invalid:29400", is_shared=True)
    check_endpoint(f"localhost:{port}", is_shared=False)


def test_what_is_not_saved_in_its_time_is_left(place):
    """A training that is told to end and is stuck, here in its data, has its grace and no more."""
    with started("--grace-seconds", "0.5", "--data-args", "stuck_after=3") as process:
        wait_for(has_step(2), process=process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert "SIGTERM: not saved within 0.5 s" in err


def build_differently(folder):
    os.chdir(folder)
    rank = dist.get_rank()
    given = read_config(Path("run.toml"), [("lr", str(0.1 + rank)), ("log_dir", f"logs{rank}")])
    with ExitStack() as stack, pytest.raises(UsageError) as caught:
        build_trainer(given, stack)
    return str(caught.value)


def test_processes_that_were_told_different_things_refuse(place):
    """Row 12: machines that were given different files; what belongs to a machine may differ."""
    told = processes.run(build_differently, 2, str(place))
    assert told == ["the processes have different configurations: lr: 0.1 (lane 0), 1.1 (lane 1)"] * 2


ATTEMPTS = """
import os
import torch.distributed as dist
from penstock.runtime.wire.rendezvous import join_processes

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
os.environ.update(given, TORCHELASTIC_USE_AGENT_STORE="True")
for attempt in "01":
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    join_processes(5.0)
    store = dist.distributed_c10d._get_default_store()
    assert not store.check(["address"]), "it sees what the attempt before left"
    store.set("address", "mine")
    dist.destroy_process_group()
"""


def test_processes_do_not_find_the_addresses_of_those_before_them():
    """torchrun keeps its store when it starts processes again: the new ones once called on the dead."""
    done = subprocess.run([sys.executable, "-c", ATTEMPTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_machine_that_never_comes_back(place):
    """Row 27: of two launchers one is killed; the other goes on with one lane, from the last checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "tests"]
    words += ["--steps", "100000", "--rdzv-conf", "last_call_timeout=4"]
    words += ["--rdzv-conf", "keep_alive_interval=2", "--rdzv-conf", "keep_alive_max_attempt=3"]
    with (
        started(*words, "--rdzv-conf", "is_host=true") as stays,
        started(*words, "--rdzv-conf", "is_host=false") as goes,
    ):
        wait_for(lambda: has_begun(2, then="save"), process=stays)
        assert len(workers(place)) == 2
        goes.kill()
        wait_for(lambda: has_begun(1), process=stays)
        assert events()[-1]["step"] >= 5
        stays.send_signal(signal.SIGTERM)
        _, err = stays.communicate(timeout=SECONDS)
        assert stays.returncode == 0, err
