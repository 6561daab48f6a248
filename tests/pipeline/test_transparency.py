"""The first test of everything that runs: loss and every gradient are the plain model's."""

import pytest
import torch
from torch import nn

import penstock
import processes
from cases import NAMES
from pipelines import WIDTH, Knotty, data, differences, expected, faults_of, sequence

SYNCHRONOUS = [name for name in NAMES if not name.startswith("pipedream")]
KEEPS = ["hold", "recompute", "offload"]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_threads(name, keep):
    """1 to 4 lanes; batches that divide, that do not, and that have fewer samples than there are micro-batches."""
    model = sequence()
    assert not [fault for lanes in (1, 2, 3, 4) for fault in faults_of(model, name, lanes, keep)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("path", ["export", "replay"])
def test_threads_with_skips_and_tied_weights(path, keep):
    model = Knotty()
    assert not [
        fault for name in SYNCHRONOUS for lanes in (2, 3) for fault in faults_of(model, name, lanes, keep, path=path)
    ]


def in_processes(lanes, keep, transport):
    model = sequence()
    return [fault for name in SYNCHRONOUS for fault in faults_of(model, name, lanes, keep, transport=transport)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_processes(lanes, keep):
    assert processes.run(in_processes, lanes, lanes, keep, "shared") == [[]] * lanes


def knotty_in_processes(lanes, path, transport):
    model = Knotty()
    return [
        fault for name in SYNCHRONOUS for fault in faults_of(model, name, lanes, "hold", path=path, transport=transport)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ["export", "replay"])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_processes_with_skips_and_tied_weights(path, transport):
    assert processes.run(knotty_in_processes, 2, 2, path, transport) == [[]] * 2


def big_values(transport):
    """Activations that travel through shared memory, or by gloo, and not with the head of their message."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, 4096).double(), nn.Tanh(), nn.Linear(4096, WIDTH).double()) for _ in "ab"]
    wide = [nn.Linear(WIDTH, 2048).double(), nn.Linear(2048, WIDTH).double()]
    found = []
    for modules in (stages, wide):
        x, target = data(128)
        wanted = expected(nn.Sequential(*modules), x, target)
        with penstock.Pipeline(
            modules, example=x, loss=nn.functional.mse_loss, micro_batches=4, transport=transport, timeout=30
        ) as pipe:
            for _ in range(3):  # memory is used again from the second step on
                pipe.zero_grad()
                loss = pipe.step(x, target)
            found += list(differences(pipe, loss, wanted))
    return found


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_processes_with_big_values(transport):
    assert processes.run(big_values, 2, transport) == [[], []]
