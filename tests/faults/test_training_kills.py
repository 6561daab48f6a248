"""Rows 1, 2, 28 and 33: processes that are killed in the middle of something are started again, and nothing is lost."""

import os
import signal
import time

import pytest
import torch.distributed as dist

import processes
from faults import launched
from faults.jobs import BATCH, SAMPLES
from faults.launched import JOBS
from training_runs import dropping, train

pytestmark = pytest.mark.xdist_group("processes")

KILLED = f"ended with {-signal.SIGKILL}"


# ---- at every kind of action, on both lanes


def training_process(folder, faults, attempt, schedule, steps):
    """Train with faults; return how it ended, or what this lane says of the other."""
    os.environ |= {
        "PENSTOCK_FAULTS": faults, "TORCHELASTIC_RESTART_COUNT": str(attempt), "RANK": str(dist.get_rank()),
        "WORLD_SIZE": "2",
    }  # fmt: skip
    given = {"lanes": None, "schedule": schedule, "steps": steps, "model": dropping(rate=0.1), "view": False}
    return train(folder, checkpoint_every=1, log_every=1, **given)[0].status


def undisturbed(folder, schedule, steps):
    """Return the losses of the same training in threads, to which nothing happens."""
    train(folder, schedule=schedule, steps=steps, model=dropping(rate=0.1), log_every=1, view=False)
    return launched.losses(folder), launched.weights(folder)


@pytest.mark.parametrize(
    ("schedule", "actions"),
    [
        ("zb_h1", [(0, "F1"), (1, "F1"), (0, "I1"), (1, "I1"), (0, "W1"), (1, "W1"), (0, "SEND_F1"), (1, "SEND_B1"),
                   (0, "RECV_B2"), (1, "RECV_F2"), (0, "optimizer"), (1, "optimizer"), (0, "data"), (1, "data")]),
        ("1f1b", [(0, "B1"), (1, "B1"), (0, "step"), (1, "step"), (0, "save"), (1, "save")]),
    ],
)  # fmt: skip
def test_a_kill_at_any_action_of_any_lane(tmp_path, schedule, actions):
    """One training, killed once for each of them; its losses and weights are those of one that nothing happened to."""
    steps = len(actions) + 2
    for attempt, (lane, action) in enumerate(actions):
        # the last save is the one that ends a training, and is waited for
        step = steps if action == "save" else attempt + 2
        faults = f"kill@lane={lane},step={step},action={action},attempt={attempt}"
        results = processes.run(training_process, 2, tmp_path / "run", faults, attempt, schedule, steps, may_fail=True)
        assert results[lane] == KILLED, faults
        assert f"LostError: lane {lane} is gone" in results[1 - lane] or action == "save", results[1 - lane]
    ends = processes.run(training_process, 2, tmp_path / "run", "", len(actions), schedule, steps)
    assert ends == ["done", "done"]
    losses, weights = undisturbed(tmp_path / "alone", schedule, steps)
    assert launched.losses(tmp_path / "run") == losses
    assert launched.is_same(launched.weights(tmp_path / "run"), weights)


# ---- at random


def test_chaos(tmp_path):
    """Faults at random, as they come, for some seconds, then none: the weights are those of an undisturbed run."""
    steps, begin, attempts, kills, hangs = 60, time.monotonic(), 0, 0, 0
    while time.monotonic() - begin < 8.0 or not kills:
        faults = f"mtti=400ms,seed={attempts},kinds=kill"
        told = processes.run(
            training_process, 2, tmp_path / "run", faults, attempts, "zb_h1", steps, may_fail=True
        )  # fmt: skip
        kills += KILLED in told
        attempts += 1
        if told == ["done", "done"]:
            break
    assert kills
    processes.run(training_process, 2, tmp_path / "run", "", attempts, "zb_h1", steps)
    losses, weights = undisturbed(tmp_path / "alone", "zb_h1", steps)
    assert launched.losses(tmp_path / "run") == losses
    assert launched.is_same(launched.weights(tmp_path / "run"), weights)
