"""Folders: several users of one folder of checkpoints, its other spellings, and what a save says when it fails."""

import errno
import fcntl
import os
import threading
import warnings

import pytest

import penstock
import processes
from checkpoint_cases import Training
from penstock.tensor_files.disk import Disk

LEFT = "tmp-000007-0123456789"


class Halting(Disk):
    """Waits in the first sync, with the checkpoint half written."""

    def __init__(self):
        self.at, self.go_on = threading.Event(), threading.Event()

    def sync(self, handle):
        self.at.set()
        assert self.go_on.wait(60)
        super().sync(handle)


@pytest.fixture
def halted(tmp_path):
    """Return a training whose save of step 2 is under way, and the disk that holds it up."""
    with Training(tmp_path, model="small") as training:
        training.checkpoints.save(1, wait=True)
        disk = training.checkpoints._disk = Halting()
        training.checkpoints.save(2)
        assert disk.at.wait(60)
        try:
            yield training, disk
        finally:
            disk.go_on.set()


def tmp_names(folder):
    return sorted(path.name for path in folder.glob("tmp-*"))


def test_who_only_restores_leaves_the_save_of_a_training_alone(halted, tmp_path):
    """An evaluation beside a training: it deleted what that was writing."""
    training, disk = halted
    before = tmp_names(tmp_path)
    assert before
    reader = penstock.Checkpoints(tmp_path, training.pipe)
    assert reader.restore().step == 1
    assert tmp_names(tmp_path) == before
    disk.go_on.set()
    training.checkpoints.wait()
    assert training.checkpoints.steps() == [1, 2]
    assert not training.checkpoints.failures


def _save_beside(folder):
    """Save to the folder of a training that saves."""
    with Training(folder, model="small") as training:
        training.checkpoints.save(5, wait=True)
        return training.checkpoints.steps()


@pytest.mark.parametrize("is_process", [False, True])
def test_a_second_one_that_saves_sweeps_only_when_nobody_else_writes(halted, tmp_path, is_process):
    training, disk = halted
    (tmp_path / LEFT).mkdir()
    if is_process:
        assert processes.run(_save_beside, 1, tmp_path) == [[1, 5]]
    other = penstock.Checkpoints(tmp_path, training.pipe)
    other.save(6, wait=True)
    assert LEFT in tmp_names(tmp_path)
    assert len(tmp_names(tmp_path)) == 2
    disk.go_on.set()
    training.checkpoints.wait()
    assert training.checkpoints.steps()[-1] == 2
    assert not training.checkpoints.failures
    other.save(7, wait=True)  # now it is alone
    assert tmp_names(tmp_path) == []


def test_a_child_that_outlives_the_save_does_not_hold_it(halted, tmp_path):
    """Workers of a loader are copies of the process, with all that it has open."""
    training, disk = halted
    inside, outside = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(outside)
        os.read(inside, 1)  # until the parent has done
        os._exit(0)
    os.close(inside)
    try:
        disk.go_on.set()
        training.checkpoints.wait()
        (tmp_path / LEFT).mkdir()
        penstock.Checkpoints(tmp_path, training.pipe).save(3, wait=True)
        assert tmp_names(tmp_path) == []
    finally:
        os.close(outside)
        os.waitpid(child, 0)


def test_without_locks_only_what_is_old_is_swept(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert fcntl.flock is no_locks
    for name in (LEFT, LEFT.replace("7", "8")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").touch()
    for path in (tmp_path / LEFT, tmp_path / LEFT / "x"):
        os.utime(path, (0, 0))
    with Training(tmp_path, model="small") as training:
        training.checkpoints.save(1, wait=True)
        assert training.checkpoints.steps() == [1]
    assert tmp_names(tmp_path) == [LEFT.replace("7", "8")]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    """A training that changes to another folder saved the rest of its checkpoints there."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with Training("run", model="small") as training:
        training.checkpoints.save(1, wait=True)
        monkeypatch.chdir(tmp_path / "b")
        training.checkpoints.save(2, wait=True)
        assert training.checkpoints.restore().folder == tmp_path / "a" / "run" / "checkpoint-000002"
    assert list((tmp_path / "b").iterdir()) == []


def test_a_folder_in_another_spelling_is_the_same(tmp_path, monkeypatch):
    """A checkpoint that was taken up through a link was told not to be this training's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    with Training("run", model="small") as training:
        training.checkpoints.save(1, wait=True)
    for folder, source in (
        ("run", "link/checkpoint-000001"),
        ("link", tmp_path / "run"),
        (tmp_path / "run", "run/checkpoint-000001"),
    ):
        with Training(folder, model="small") as training:
            assert training.checkpoints.restore(source).step == 1
            training.checkpoints.save(1, wait=True)  # a warning would be an error


@pytest.mark.parametrize(("number", "is_room"), [(errno.EIO, False), (errno.EROFS, False), (errno.ENOSPC, True)])
def test_the_room_is_told_once_and_only_when_it_was_the_room(tmp_path, number, is_room):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    with Training(tmp_path, model="small") as training:
        training.checkpoints._disk.write = fail
        with pytest.warns(RuntimeWarning, match=os.strerror(number)):
            training.checkpoints.save(1, wait=True)
        (told,) = training.checkpoints.failures
        assert told.count("bytes needed") == told.count("free:") == int(is_room)
        assert told.count(os.strerror(number)) == 1
