"""The first test of everything that runs: loss and every gradient are the plain model's."""

import pytest

import processes
from cases import NAMES
from pipelines import Knotty, faults_of, sequence

SYNCHRONOUS = [name for name in NAMES if not name.startswith("pipedream")]
KEEPS = ["hold", "recompute", "offload"]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_threads(name, keep):
    """1 to 4 lanes; batches that divide, that do not, and that have fewer samples than there are micro-batches."""
    model = sequence()
    assert not [fault for lanes in (1, 2, 3, 4) for fault in faults_of(model, name, lanes, keep)]


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


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_processes(lanes, keep):
    assert processes.run(in_processes, lanes, lanes, keep, "shared") == [[]] * lanes


def knotty_in_processes(lanes, path, transport):
    model = Knotty()
    return [
        fault for name in SYNCHRONOUS for fault in faults_of(model, name, lanes, "hold", path=path, transport=transport)
    ]


@pytest.mark.xdist_group("processes")
@pytest.mark.parametrize("path", ["export", "replay"])
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_processes_with_skips_and_tied_weights(path, transport):
    assert processes.run(knotty_in_processes, 2, 2, path, transport) == [[]] * 2
