"""Rows 2, 22 and 23 by the command: what user code raises is told once and not tried again; data that ends."""

import re

import pytest

from faults import launched
from faults.launched import JOBS, config, train


@pytest.mark.sample(4)
@pytest.mark.parametrize("processes", [True, False], ids=["processes", "threads"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": f"{JOBS}:wrong_model"}, ["a mistake in the model", "lane 1, stage 1, micro-batch", "action 1F"]),
        ({"loss": f"{JOBS}:wrong_loss", "callbacks": [f"{JOBS}:Annoying"]}, ["a mistake in the loss", "lane 1"]),
        ({"data": f"{JOBS}:wrong_data"}, ["a mistake in the data", "DataLoader worker process 0"]),
        ({"callbacks": [f"{JOBS}:Strict"]}, ["a mistake in the callback"]),
    ],
    ids=["model", "loss", "data", "callback"],
)
def test_what_user_code_raises(tmp_path, keys, words, processes):
    path = config(tmp_path / "run.toml", check=False, **keys, **({"nproc": 2} if processes else {"lanes": 2}))
    code, _ = train(path)
    told = path.with_suffix(".err").read_text()
    assert code == 1, told
    assert len(re.findall(r"^(?:\[lane \d\] )?Traceback \(most recent call last\)", told, re.M)) == 1, told
    for word in [*words, "jobs.py"]:
        assert word in told
    assert "started again" not in told
    assert len(launched.faults(tmp_path / "run", "restart")) == 0
    if "callback" not in words[0]:  # one that is not strict is told of, and the training goes on
        assert launched.events(tmp_path / "run", "log") or "data" in words[0]
    if "loss" in words[0]:
        assert (
            told.count("Annoying.on_step_end raised ValueError: a mistake in the callback; the training continues") == 1
        )


def test_data_that_ends_early(tmp_path):
    """Not an error: what was trained is saved, and the summary says why it ended."""
    code, told = train(config(tmp_path / "run.toml", lanes=2, data=f"{JOBS}:ending_data", steps=50))
    assert code == 0, told
    (end,) = launched.events(tmp_path / "run", "train_end")
    assert end["status"] == "data ended"
    assert 0 < end["step"] < 50
    assert (tmp_path / "run" / "latest").read_text() == f"checkpoint-{end['step']:06d}\n"


@pytest.mark.full
def test_the_same_hang_twice_is_not_tried_a_third_time(tmp_path):
    """One that hangs at the same place twice would do so again."""
    keys = {"nproc": 2, "timeout": 1.0, "max_restarts": 5}
    stop = "stop@lane=1,step=3,action=F1"
    with launched.launch(config(tmp_path / "run.toml", **keys), PENSTOCK_FAULTS=f"{stop}; {stop},attempt=1") as run:
        assert run.wait() == 1, run.told()
        told = run.err.read_text()
    assert told.count("is stopped (SIGSTOP, or Ctrl-Z)") == 2
    assert told.count("all processes restart") == 1
    assert "the same failure twice, at step 3: lane 0 has waited" in told
    assert [line["code"] for line in launched.faults(tmp_path / "run", "give up")] == [1]


# ---- data that never comes


@pytest.mark.sample(1)
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("how", ["hanging_data", "hanging_workers"])
def test_a_data_loader_that_hangs_is_named(tmp_path, nproc, how):
    """Nothing was said: every process waited for its loader, for ever."""
    keys = {"data_args": {"on": "all"}} if how == "hanging_data" else {}
    path = config(tmp_path / "run.toml", data=f"{JOBS}:{how}", timeout=2.0, **keys)
    code, told = train(path, "--nproc", nproc)
    who = "the training" if nproc == 1 else "lane "
    assert f"Error: {who}" in told
    assert " s for a batch from its data loader" in told
    assert ("; the other lanes wait for it" in told) == (nproc == 2)
    assert "the data loader: stack (most recent call first):" in told
    assert launched.faults(tmp_path / "run", "end")[0]["step"] == 3
    if nproc == 2:
        assert code == 1
        assert "the same failure twice, at step 3" in told
    else:
        assert code == 75


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["in Python", "in C"])
def test_a_data_loader_that_hangs_on_one_lane_is_named_by_all(tmp_path, how):
    """In Python it is interrupted; in code that nothing interrupts its process ends."""
    path = config(tmp_path / "run.toml", data=f"{JOBS}:hanging_data", data_args={"how": how, "on": 1}, timeout=2.0)
    code, told = train(path, "--nproc", 2)
    assert code == 1, told
    words = (
        "lane 1 has waited 2 s for a batch from its data loader; the other lanes wait for it",
        "lane 1, which is waiting for its data loader for",
    )
    assert any(word in told for word in words), told
