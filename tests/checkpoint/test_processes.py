"""Processes: each writes its own shards, and threads or other processes take them up."""

import os
import signal
import time

import pytest
import torch

import penstock
import processes
from checkpoint_cases import Training, losses_of
from penstock.errors import CheckpointError
from penstock.tensor_files.manifest import read_manifest
from penstock.tensor_files.tensor_shards import Shard

HALF, END = 3, 6


def _train(folder, begin, end, restore, schedule, model):
    return losses_of(folder, begin, end, save=not restore, restore=restore, schedule=schedule, model=model, lanes=None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["knotty", "odd"])
def test_processes_and_threads_take_up_what_the_others_saved(tmp_path, model):
    wanted = losses_of(tmp_path / "unused", 0, END, model=model)[HALF:]
    both = processes.run(_train, 2, tmp_path / "two", 0, HALF, False, "1f1b", model)
    assert both[0] == both[1]
    for lanes in (1, 3):
        found = losses_of(tmp_path / "two", HALF, END, restore=True, model=model, lanes=lanes)
        assert found == pytest.approx(wanted, rel=1e-10)
    if model == "odd":
        for found in processes.run(_train, 3, tmp_path / "two", HALF, END, True, "gpipe", model):
            assert found == pytest.approx(wanted, rel=1e-10)
    losses_of(tmp_path / "threads", 0, HALF, save=True, model=model, lanes=3)
    for found in processes.run(_train, 2, tmp_path / "threads", HALF, END, True, "zb_h1", model):
        assert found == pytest.approx(wanted, rel=1e-10)


def _damaged(folder, lane):
    """Save twice, damage the newest, restore."""
    with Training(folder, lanes=None) as training:
        for step in (1, 2):
            training.run(step - 1, step)
            training.checkpoints.save(step, wait=True)
        path = folder / "checkpoint-000002" / f"model-0000{lane + 1}-of-00002.safetensors"
        training.pipe.internals.group.control.gather(None)
        if 0 in training.pipe.lanes:
            content = bytearray(path.read_bytes())
            content[-5] ^= 4
            path.write_bytes(content)
        training.pipe.internals.group.control.gather(None)
        with pytest.warns(RuntimeWarning, match="went back to the checkpoint of step 1"):
            restored = training.checkpoints.restore()
        return restored.step, restored.passed_over


@pytest.mark.sample(1)
@pytest.mark.parametrize("lane", [0, 1])
def test_all_go_back_when_one_finds_damage(tmp_path, lane):
    told = processes.run(_damaged, 2, tmp_path, lane)
    assert told[0] == told[1]
    assert told[0][0] == 1
    assert f"model-0000{lane + 1}-of-00002.safetensors: tensor" in told[0][1][0]
    assert "expected" in told[0][1][0]


def _half_fails(folder):
    """Let the second process fail to write in the second save; the third works again."""
    with Training(folder, lanes=None) as training:
        checkpoints, told = training.checkpoints, []
        checkpoints.on_saved = lambda step, _: told.append(step)
        training.run(0, 1)
        checkpoints.save(1)
        checkpoints.wait()
        write = checkpoints._disk.write
        if 1 in training.pipe.lanes:

            def fail(handle, data):
                raise OSError(28, "No space left on device")

            checkpoints._disk.write = fail
        training.run(1, 2)
        checkpoints.save(2)
        training.run(2, 3)
        checkpoints._saving.wait_written()
        checkpoints._disk.write = write
        with pytest.warns(RuntimeWarning, match=r"step 2 was NOT saved.*process 1.*No space left on device"):
            checkpoints.save(3)
        checkpoints.wait()
        return checkpoints.failures, told, checkpoints.steps(), sorted(p.name for p in folder.iterdir())


def test_a_process_that_cannot_write_is_heard_of_by_all_and_the_next_save_works(tmp_path):
    for failures, told, steps, names in processes.run(_half_fails, 2, tmp_path):
        assert len(failures) == 1
        assert failures[0].count("bytes needed") == 1
        assert told == [1, 3]
        assert steps == [1, 3]
        assert names == ["checkpoint-000001", "checkpoint-000003", "latest"]


def _dies(folder):
    """Save once; then the second process is killed in the middle of its shard."""
    with Training(folder, lanes=None) as training:
        checkpoints = training.checkpoints
        checkpoints.patience_seconds = 0.5
        training.run(0, 1)
        checkpoints.save(1, wait=True)
        if 1 in training.pipe.lanes:
            checkpoints._disk.sync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        training.run(1, 2)
        checkpoints.save(2)
        begin = time.monotonic()
        with pytest.warns(RuntimeWarning, match="process 1 did not write its part"):
            checkpoints.close()
        return checkpoints.steps(), time.monotonic() - begin


def test_a_process_that_is_killed_in_a_save_leaves_the_one_before(tmp_path):
    first, second = processes.run(_dies, 2, tmp_path, may_fail=True)
    assert first[0] == [1]
    assert first[1] < 30
    assert second == "ended with -9"
    assert losses_of(tmp_path, 1, 2, restore=True) == pytest.approx(losses_of(tmp_path / "unused", 0, 2)[1:], rel=1e-10)
    assert any(tmp_path.glob("tmp-*"))
    losses_of(tmp_path, 1, 2, restore=True, save=True)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["checkpoint-000001", "checkpoint-000002", "latest"], "what was left is swept"


def _differs(folder):
    """Ask for what only one process cannot save."""
    with Training(folder, lanes=None) as training:
        notes = {"x": object()} if 1 in training.pipe.lanes else {}
        try:
            training.checkpoints.save(1, notes=notes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "saved"


def test_what_one_process_cannot_save_is_an_error_in_all(tmp_path):
    told = processes.run(_differs, 2, tmp_path)
    assert told[0].startswith("UsageError: another process cannot save: notes.x")
    assert told[1].startswith("UsageError: notes.x")


def _cannot_check(folder):
    """Give one process a scheduler whose state cannot be saved; return what each says before the first step."""
    with Training(folder, lanes=None) as training:
        if 1 in training.pipe.lanes:
            training.schedulers[0].odd = {1, 2}
        try:
            training.checkpoints.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "fine"


def test_what_one_process_could_not_save_is_an_error_in_all_before_the_first_step(tmp_path):
    told = processes.run(_cannot_check, 2, tmp_path)
    assert told[0].startswith("UsageError: another process cannot save: scheduler 0.odd")
    assert told[1].startswith("UsageError: scheduler 0.odd")
    assert list(tmp_path.iterdir()) == []


class _Refusing:
    def __init__(self, refuses):
        self.refuses, self.place = refuses, 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        if self.refuses:
            raise ValueError("not mine")
        self.place = state["place"]


def _refused_by_one(folder):
    """Restore where the data of one process refuses its state; return what changed here, and the error."""
    with Training(folder, lanes=None) as training:
        data = _Refusing(False)
        own = penstock.Checkpoints(folder, training.pipe, optimizer=training.optimizers, data=data)
        data.place = 7
        training.run(0, 1)
        own.save(1, wait=True)
        data.place, data.refuses = 9, 1 in training.pipe.lanes
        training.run(1, 2)
        before = [t.clone() for t in training.pipe.state_dict().values()]
        with pytest.raises(CheckpointError) as caught:
            own.restore()
        after = list(training.pipe.state_dict().values())
        return data.place, all(map(torch.equal, before, after)), str(caught.value)


def test_what_one_process_refuses_changes_nothing_in_any(tmp_path):
    for place, is_same, told in processes.run(_refused_by_one, 2, tmp_path):
        assert (place, is_same) == (9, True)
        assert "data: refuses its saved state: not mine" in told


def _other_optimizer(folder, kind):
    with Training(folder, lanes=None) as training:
        if kind == "lost":  # by the second process only
            optimizers = training.optimizers if 0 in training.pipe.lanes else []
        else:
            optimizers = torch.optim.LBFGS(training.pipe.parameters())
        own = penstock.Checkpoints(folder, training.pipe, optimizer=optimizers)
        try:
            own.restore() if kind == "lost" else own.check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "fine"


def test_parameters_without_their_optimizer_are_noticed_wherever_they_are(tmp_path):
    losses_of(tmp_path, 0, 1, save=True)
    told = processes.run(_other_optimizer, 2, tmp_path, "lost")
    assert told[0] == told[1]
    assert told[0].startswith("MisfitError")
    assert "saved with an optimizer and have none now: optimizer 0, group 0: 6.weight" in told[0]


def test_an_optimizer_of_all_parameters_in_a_row_is_refused_in_processes(tmp_path):
    for told in processes.run(_other_optimizer, 2, tmp_path, "row"):
        assert "LBFGS keeps one flat state" in told


def _reads(folder):
    """Save, restore, and return the tensors that were read here, as often as they were."""
    with Training(folder, lanes=None) as training:
        training.run(0, 1)
        training.checkpoints.save(1, wait=True)
        noted, real = [], Shard.read
        Shard.read = lambda shard, name: noted.append((shard.path.name, name)) or real(shard, name)
        training.checkpoints.restore()
        return noted


def test_each_process_reads_its_own_part_once(tmp_path):
    first, second = processes.run(_reads, 2, tmp_path)
    files = read_manifest(tmp_path / "checkpoint-000001").files
    wanted = sorted((file, name) for file, entry in files.items() for name in entry.get("tensors", ()))
    assert sorted([*first, *second]) == wanted
    assert {file for file, _ in first} == {f"{kind}-00001-of-00002.safetensors" for kind in ("model", "optim")}


def _random(folder, restore):
    with Training(folder, lanes=None) as training:
        lane = training.pipe.lanes[0]
        torch.manual_seed(10 + lane)
        if restore:
            training.checkpoints.restore()
        else:
            training.checkpoints.save(1, wait=True)
        return float(torch.rand(1))


def test_each_process_gets_its_own_random_state_and_more_get_the_first(tmp_path):
    saved = processes.run(_random, 2, tmp_path, False)
    assert saved[0] != saved[1]
    assert processes.run(_random, 2, tmp_path, True) == saved
    with Training(tmp_path / "threads") as training:
        training.checkpoints.save(1, wait=True)
        drawn = float(torch.rand(1))
    assert processes.run(_random, 2, tmp_path / "threads", True) == [drawn, drawn]
