"""Rows 1, 2, 28 and 33: processes that are killed in the middle of something are started again, and nothing is lost."""

import os
import signal
import time

import pytest
import torch.distributed as dist

import processes
from faults import jobs, launched
from training_runs import dropping, train

KILLED = f"ended with {-signal.SIGKILL}"


# ---- at every kind of action, on both lanes


def training_process(folder, faults, attempt, schedule, steps):
    """Train with faults; return how it ended, or what this lane says of the other."""
    os.environ |= {
        "PENSTOCK_FAULTS": faults, "TORCHELASTIC_RESTART_COUNT": str(attempt), "RANK": str(dist.get_rank()),
        "WORLD_SIZE": "2",
    }  # fmt: skip
    return train(folder, lanes=None, checkpoint_every=3, **asked(schedule, steps))[0].status


def asked(schedule, steps):
    """Return what is trained: two stages, with dropout; nothing is to be captured, so that a start is quick."""
    model = dropping(rate=0.1)
    return {"schedule": schedule, "steps": steps, "model": [model[:8], model[8:]], "log_every": 1, "view": False,
            "analytic": None}  # fmt: skip


def undisturbed(folder, schedule, steps):
    """Return the losses of the same training in threads, to which nothing happens."""
    train(folder, **asked(schedule, steps))
    return launched.losses(folder), launched.weights(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("schedule", "actions"),
    [
        ("zb_h1", [(0, "F1"), (1, "F1"), (0, "I1"), (1, "I1"), (0, "W1"), (1, "W1"), (0, "SEND_F1"), (1, "SEND_B1"),
                   (0, "RECV_B2"), (1, "RECV_F2"), (0, "optimizer"), (1, "optimizer")]),
        ("1f1b", [(0, "B1"), (1, "B1"), (0, "save"), (1, "save")]),
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


# ---- which samples


def counting_process(folder, faults, attempt):
    os.environ |= {"PENSTOCK_FAULTS": faults, "TORCHELASTIC_RESTART_COUNT": str(attempt), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": "2", "SAMPLES_SEEN": str(folder / "samples")}
    callbacks = [jobs.Ids()]
    given = asked("1f1b", 9) | {"model": jobs.model(), "loss": jobs.noting_loss, "batches": jobs.data(), "check": False}
    for stage in given["model"]:
        stage.double()
    given["example"] = next(iter(given["batches"]))[0].double()
    return train(folder, lanes=None, checkpoint_every=2, callbacks=callbacks, split=doubled, **given)[0].status


def doubled(item):
    return tuple(part.double() for part in item)


def test_every_sample_once_an_epoch_whatever_is_killed(tmp_path):
    """Over three kills, in the middle of epochs: of the steps that count, each epoch has every sample once."""
    for attempt, fault in enumerate(
        ["lane=1,step=3,action=B1", "lane=0,step=5,action=F2", "lane=1,step=8,action=optimizer"]
    ):
        told = processes.run(
            counting_process, 2, tmp_path, f"kill@{fault},attempt={attempt}", attempt, may_fail=True
        )  # fmt: skip
        assert KILLED in told
    processes.run(counting_process, 2, tmp_path, "", 3)
    lines = [list(map(int, line.split())) for line in (tmp_path / "samples").read_text().splitlines()]
    seen = {step: samples for step, *samples in lines}  # of a step that was made again the last counts
    assert len(lines) > len(seen), "steps were made again"
    assert sorted(seen) == list(range(1, 10))
    epochs = [[*seen[first], *seen[first + 1], *seen[first + 2]] for first in (1, 4, 7)]
    assert all(sorted(epoch) == list(range(jobs.SAMPLES)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2], "each is shuffled anew"


# ---- at random


@pytest.mark.full
def test_chaos(tmp_path):
    """Faults at random, as they come, for some seconds, then none: the weights are those of an undisturbed run."""
    steps, begin, attempts, kills = 60, time.monotonic(), 0, 0
    while time.monotonic() - begin < 6.0 or not kills:
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
