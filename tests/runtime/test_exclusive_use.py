"""Who may use a pipeline: one thread at a time, of the process that made it."""

import contextlib
import os
import signal
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import processes
from penstock.errors import LaneError, UsageError
from pipelines import WIDTH, data, differences, expected, sequence

_SECONDS = 60


class Gate(nn.Module):
    """Lets a call wait until another one has been refused."""

    def __init__(self, entered, go_on):
        super().__init__()
        self.linear, self.gates, self.is_shut = nn.Linear(WIDTH, WIDTH).double(), (entered, go_on), False

    def __deepcopy__(self, memo):
        return self

    def forward(self, x):
        if self.is_shut:
            self.gates[0].set()
            self.gates[1].wait(_SECONDS)
        return self.linear(x)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("call", ["step", "evaluate", "forward"])
def test_a_second_thread_is_refused(lanes, call):
    """Two threads in one pipeline hung, or mixed up their batches."""
    entered, go_on = threading.Event(), threading.Event()
    gate, last = Gate(entered, go_on), nn.Linear(WIDTH, WIDTH).double()
    x, target = data(8)
    stages = [gate, last] if lanes == 2 else [nn.Sequential(gate, last)]
    with penstock.Pipeline(
        stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, lanes=lanes, schedule="gpipe"
    ) as pipe:
        gate.is_shut, found = True, []
        first = threading.Thread(target=lambda: found.append(pipe.step(x, target)), name="the first")
        first.start()
        assert entered.wait(_SECONDS)
        try:
            with pytest.raises(UsageError, match=r"in use by thread 'the first'; .* this is thread 'MainThread'"):
                getattr(pipe, call)(*([x] if call == "forward" else [x, target]))
        finally:
            go_on.set()
            first.join(_SECONDS)
        gate.is_shut = False
        wanted = expected(nn.Sequential(gate, last), x, target)
        assert float(found[0]) == pytest.approx(float(wanted[0]), abs=1e-12)  # the first was not disturbed
        gradients = sorted(float(p.grad.sum()) for p in pipe.parameters())
        assert gradients == pytest.approx(sorted(float(g.sum()) for g in wanted[1].values()), abs=1e-12)
        pipe.step(x, target)


def forked(use):
    """Return what a use of something says in a forked child, or that it hung."""
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's own, of threads and forks
        child = os.fork()
    if child == 0:
        try:
            use()
            told = "no error"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writes, told.encode())
        os._exit(0)
    os.close(writes)
    end = time.monotonic() + _SECONDS
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(0.01)
    with os.fdopen(reads, "rb") as file:
        return file.read().decode() or "it hung"


def test_a_forked_child_is_refused():
    """Its lanes are threads of its parent, so a step there hung for ever."""
    x, target = data(8)
    model = sequence(4)
    with penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, micro_batches=4, lanes=2, cuts=[4]) as pipe:
        pipe.step(x, target)
        for use in (lambda: pipe.step(x, target), lambda: pipe.evaluate(x, target), lambda: pipe(x)):
            assert f"UsageError: the pipeline was made by process {os.getpid()}, and this is a fork of it" in forked(
                use
            )
        assert forked(pipe.close) == "no error"
        pipe.zero_grad()
        assert not list(differences(pipe, pipe.step(x, target), expected(model, x, target)))


def test_a_forked_child_of_inference_is_refused():
    with penstock.infer.RequestPipeline(nn.Linear(4, 2)) as pipe:
        x = torch.ones(3, 4)
        before = pipe.submit(x).result(_SECONDS)
        assert "UsageError: the pipeline was made by process" in forked(lambda: pipe.submit(x).result(5))
        assert "UsageError: the pipeline was made by process" in forked(lambda: list(pipe.map([x])))
        assert forked(pipe.close) == "no error"
        assert torch.equal(pipe.submit(x).result(_SECONDS), before)


def forking_process():
    x, target = data(8)
    model = sequence(4)
    pipe = penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, micro_batches=4, cuts=[4], timeout=20)
    pipe.step(x, target)

    def leave():
        with contextlib.suppress(UsageError):
            pipe.step(x, target)
        pipe.close()

    told = forked(lambda: pipe.step(x, target)), forked(leave)
    dist.barrier()
    pipe.zero_grad()
    try:
        left = list(differences(pipe, pipe.step(x, target), expected(model, x, target)))
    except LaneError as error:
        left = str(error)
    pipe.close()
    return told, left


def test_a_forked_child_does_not_say_goodbye_for_its_parent():
    """The child of a lane told the other lanes that this one had left."""
    for (told, left_alone), left in processes.run(forking_process, 2):
        assert "UsageError: the pipeline was made by process" in told
        assert left_alone == "no error"
        assert left == []
