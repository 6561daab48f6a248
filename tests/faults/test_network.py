"""The network between processes: ports in use, slow links, clocks that jump, messages that come twice, strangers."""

import ast
import os
import socket
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import processes
from penstock.errors import HangError, LostError, UsageError
from penstock.runtime.wire.messages import Head, SentDescriptions
from penstock.runtime.wire.process_transport import ABORT, DATA, ProcessTransport
from penstock.runtime.wire.rendezvous import join_processes
from penstock.runtime.wire.shared_memory import Outgoing, SharedMemory
from penstock.runtime.wire.sockets import Frame, Links
from penstock.runtime.wire.transport import Key
from penstock.schedule.actions import Kind
from pipelines import data, differences, expected, sequence

SOURCE = Path(penstock.__file__).parent


def make(model, **options):
    options = {"cuts": [4], "micro_batches": 4, "timeout": 20.0} | options
    return penstock.Pipeline(model, example=data(8)[0], loss=nn.functional.mse_loss, **options)


# ---- row 17: where processes meet


def meeting(monkeypatch, **environment):
    """Return what is said where processes do not meet."""
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"} | environment
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        join_processes(1.0)
    return str(caught.value)


def test_a_port_in_use_is_told_in_one_line_with_its_owner(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = meeting(monkeypatch, MASTER_PORT=str(port))
    assert told.startswith(f"port {port} of 127.0.0.1 is in use by process {os.getpid()} (")
    assert "\n" not in told


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}, "there is no host 'no-such-host.invalid'"),
        ({"MASTER_PORT": "http"}, "'http' is not a port"),
        ({"MASTER_PORT": "0"}, "'0' is not a port"),
        ({"MASTER_PORT": ""}, "start with torchrun"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_at_once(environment, words, monkeypatch):
    told = meeting(monkeypatch, **environment)
    assert words in told
    assert "\n" not in told


# ---- row 19: a slow link


class Slowed:
    """Reads frames as the links do, but values come later, each after a time of its own."""

    def __init__(self, links, seconds):
        self._read, self._seconds, self._waiting = links.read, seconds, deque()
        links.read = self.read

    def read(self, seconds):
        now = time.monotonic()
        for frame in self._read(0.002 if self._waiting else seconds):
            late = self._seconds * (1 + len(self._waiting) % 3) if frame.type == DATA else 0.0
            self._waiting.append((max(now + late, self._waiting[-1][0] if self._waiting else 0.0), frame))
        found = []
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            found.append(self._waiting.popleft()[1])
        return found


def slow_process():
    x, target = data(8)
    model = sequence(4)
    pipe = make(model, timeout=2.0)
    pipe.step(x, target)
    pipe.zero_grad()
    with pipe.record() as quick:
        pipe.step(x, target)
    quick = quick.timeline
    Slowed(pipe.internals.group._links, 0.03)
    pipe.zero_grad()
    with pipe.record() as timeline:
        loss = pipe.step(x, target)
    left = list(differences(pipe, loss, expected(model, x, target)))
    causes = timeline.causes
    shares = {name: getattr(causes, name) for name in ("warm_up", "imbalance", "transfers", "overhead")}
    pipe.close()
    return left, shares, quick.step_seconds, timeline.step_seconds


def test_a_slow_link_is_no_hang_and_is_seen():
    for left, shares, quick, slow in processes.run(slow_process, 2):
        assert not left
        assert slow > quick
        assert max(shares, key=shares.get) == "transfers", shares


# ---- row 20: clocks


def jumping_process():
    """Let the wall clock of one process jump by an hour, there and back, in the middle of a run."""
    x, target = data(8)
    model = sequence(4)
    pipe = make(model, timeout=5.0)
    real, shift = time.time, [0.0]
    time.time = lambda: real() + shift[0]
    late = 0
    try:
        for number in range(6):
            if dist.get_rank() == 1:
                shift[0] = (0.0, 3600.0, -3600.0)[number % 3]
            pipe.zero_grad()
            with pipe.record() as timeline:
                loss = pipe.step(x, target)
            late += sum(receive < send for send, receive in crossings(timeline))
    finally:
        time.time = real
    left = list(differences(pipe, loss, expected(model, x, target)))
    pipe.close()
    return left, late


def crossings(timeline):
    """Yield when each send began and when its receive ended."""
    sends, receives = {}, {}
    for span in timeline:
        kind, stage, mb = span.action
        if kind in (Kind.SEND_F, Kind.SEND_B):
            sends[kind, stage + (1 if kind is Kind.SEND_F else -1), mb] = span.start
        if kind in (Kind.RECV_F, Kind.RECV_B):
            receives[Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, stage, mb] = span.end
    assert sends.keys() == receives.keys()
    assert sends
    yield from ((sends[key], receives[key]) for key in sends)


def test_a_clock_that_jumps_does_not_matter():
    for left, late in processes.run(jumping_process, 2):
        assert not left
        assert late == 0


def test_no_limit_and_no_timeline_rests_on_the_wall_clock():
    for part in ("runtime", "pipeline", "faults"):
        for path in (SOURCE / part).rglob("*.py"):
            calls = [
                node
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute) and ast.unparse(node) in ("time.time", "datetime.now")
            ]
            assert not calls, path


# ---- row 29: messages that come twice, or late


def doubling_process(width, transport):
    """Send every message twice, and those of the steps before once more."""
    torch.manual_seed(0)
    stages = [nn.Linear(6, width).double(), nn.Linear(width, 6).double()]
    x, target = data(8)
    pipe = penstock.Pipeline(
        stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, timeout=20.0, transport=transport
    )
    links = pipe.internals.group._links
    real, old = links.send, []

    def send(peer, kind, body, descriptors=()):
        real(peer, kind, body, descriptors)
        if kind == DATA:
            real(peer, kind, body)
            for earlier in old[-12:]:
                real(peer, kind, earlier)
            old.append(bytes(body))

    links.send = send
    left = []
    for _ in range(4):
        pipe.zero_grad()
        loss = pipe.step(x, target)
        left += list(differences(pipe, loss, expected(nn.Sequential(*stages), x, target)))
    pipe.internals.group.control.gather("done")  # who has all it needs may be done while the other still repeats itself
    pipe.close()
    return left, len(old)


@pytest.mark.parametrize("width", [6, 4000], ids=["inline", "shared"])
def test_messages_that_come_twice_or_late_are_not_taken(width):
    for left, count in processes.run(doubling_process, 2, width, "auto"):
        assert not left
        assert count == 16


class Quiet:
    """Links to one other lane over which nothing goes by itself."""

    lane, lost = 1, ()

    def __init__(self, *, is_open=True, frames=()):
        self.peers, self._frames, self._reads = {0: SimpleNamespace(is_open=is_open)}, frames, 0

    def read(self, seconds):
        time.sleep(min(seconds, 0.01))
        self._reads += 1
        return self._frames if self._reads == 5 else []


@pytest.mark.parametrize(
    ("frames", "error", "words"),
    [
        ([Frame(0, ABORT, b'[0, "HangError", "lane 3 hangs"]')], HangError, "lane 3 hangs"),
        ([], LostError, "lane 0 has ended, and lane 1 still waits"),
    ],
    ids=["told", "not told"],
)
def test_who_ends_because_of_a_failure_may_be_quicker_than_the_word_of_it(frames, error, words):
    """A lane tells the others one after the other that it failed; the first of them may have left before the last."""
    transport = ProcessTransport(
        Quiet(is_open=False, frames=frames),
        device=torch.device("cpu"),
        timeout_seconds=30.0,
        carrier=SharedMemory(),
        on_hang=AssertionError,
    )
    with pytest.raises(error, match=words):
        transport.receive(Key("F", 0, 1, 0), 0)


def test_a_late_message_does_not_free_memory_that_is_in_use_again():
    carrier = SharedMemory()
    transport = ProcessTransport(
        Quiet(), device=torch.device("cpu"), timeout_seconds=1.0, carrier=carrier, on_hang=AssertionError
    )
    sent = torch.arange(20_000.0)
    number, description, _ = SentDescriptions().number([sent])
    transport._descriptions[0, number] = description
    outgoing = Outgoing()
    segment, _ = outgoing.take(description.num_bytes)
    carrier._incoming[0].add(segment.number, os.dup(segment.descriptor), segment.num_bytes)

    def head(step):
        return Head(step, 8, Key("F", 0, 1, 0), number, segment.number, description.num_bytes).pack()

    def receive(step):
        transport.start(step, 8)
        description.write([sent + step], segment.bytes)
        transport._take_data(0, head(step))
        return transport.receive(Key("F", 0, 1, 0), 0)

    assert torch.equal(receive(1)[0], sent + 1)
    assert segment.is_free  # nothing of it is in use
    assert not outgoing.take(description.num_bytes)[1]
    values = receive(2)
    for late in (1, 2):
        transport._take_data(0, head(late))  # once more
    assert not transport._arrived
    assert not segment.is_free
    assert torch.equal(values[0], sent + 2)
    del values
    assert segment.is_free
    outgoing.close()


# ---- row 30: strangers


def visit(name):
    """Come to a lane as strangers, with junk, a wrong token, half a greeting, and nothing; return what it says."""
    told = []
    for greeting in (b"GET / HTTP/1.1\r\n\r\n" * 4, os.urandom(16) + b"\1\0\0\0", b"half", b""):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"\0{name}")
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(10)
            try:
                told.append(stranger.recv(64))
            except ConnectionResetError:
                told.append(b"")
    return told


def visited_process():
    """Before lane 1 connects to lane 0, strangers do."""
    told, real = [], Links._connect

    def connect(self, other, address):
        assert self._token.hex()[:8] not in self._name  # which anyone on the machine can see
        end = time.monotonic() + 30
        while f"@{self._name}-{other}" not in Path("/proc/net/unix").read_text() and time.monotonic() < end:
            time.sleep(0.01)
        told.extend(visit(f"{self._name}-{other}"))
        return real(self, other, address)

    Links._connect = connect
    x, target = data(8)
    model = sequence(4)
    pipe = make(model)
    loss = pipe.step(x, target)
    left = list(differences(pipe, loss, expected(model, x, target)))
    open_to_all = listeners()
    Links._connect = real
    pipe.close()
    return told, left, open_to_all


def listeners():
    """Return the addresses beyond this machine that this process listens on."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(entry.readlink()))
        except OSError:
            continue
    found = []
    for table, local in (("tcp", "0100007F"), ("tcp6", "00000000000000000000000001000000")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own and not fields[1].startswith(local):
                found.append(fields[1])
    return found


def test_strangers_are_turned_away_and_the_run_goes_on():
    (_, left, open_to_all), (told, also_left, also_open) = processes.run(visited_process, 2)
    assert told == [b""] * 4  # no word to a stranger
    assert not left
    assert not also_left
    assert not open_to_all
    assert not also_open
