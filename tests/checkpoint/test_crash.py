"""Crashes: a process that ends at any moment of a save, a disk that is full, a folder that cannot be written to."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import pytest
import torch

import penstock
import processes
from checkpoint_cases import Training
from penstock.checkpoint.reader import verify
from penstock.checkpoint.save_job import Job, Saving
from penstock.errors import UsageError
from penstock.tensor_files.disk import Disk


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    with Training(tmp_path_factory.mktemp("unused"), model="small") as made:
        made.run(0, 1)
        yield made


def job_of(training, folder, step, mark, keep=1):
    """Return a save of a training whose tensors all hold the number of the step."""
    content = training.checkpoints._content
    snapshot = content.collect(step, {"step": step})
    files = {
        file: {name: torch.full_like(tensor, step) for name, tensor in tensors.items()}
        for file, tensors in snapshot.files.items()
    }
    return Job(
        folder, mark, step, 0, 1, files, snapshot.part, snapshot.state, content.plan, content.aliases, keep, (), 60.0
    )


def forked(work):
    """Run work in a copy of this process that has no other threads; return its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy only writes files
        child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    return child


class Crashing(Disk):
    """Ends the process at the n-th change of the disk, as a power cut would: what was not synced is lost."""

    def __init__(self, at=None, *, loses=False, is_half=False):
        self.count, self.at, self.loses, self.is_half = 0, at, loses, is_half
        self.unsynced = {}

    def point(self):
        self.count += 1
        if self.count - 1 == self.at:
            for kept in self.unsynced.values() if self.loses else ():
                os.ftruncate(kept, 0)
            os._exit(9)

    def write(self, handle, data):
        if self.is_half and self.count == self.at:
            super().write(handle, data[: len(data) // 2])
        number = os.fstat(handle).st_ino
        if number not in self.unsynced:
            self.unsynced[number] = os.dup(handle)
        self.point()
        super().write(handle, data)

    def sync(self, handle):
        self.point()
        super().sync(handle)
        os.close(self.unsynced.pop(os.fstat(handle).st_ino, None) or os.dup(handle))

    def replace(self, source, target):
        self.point()
        super().replace(source, target)

    def make_folder(self, path):
        self.point()
        super().make_folder(path)

    def remove(self, path):
        self.point()
        if path.is_dir():  # half of it goes first
            for file in sorted(path.iterdir())[::2]:
                file.unlink()
            self.point()
        super().remove(path)


def state_of(training, folder):
    """Return the step of the newest checkpoint; everything in it must be of that step."""
    training.checkpoints.folder = folder
    restored = training.checkpoints.restore()
    assert restored.notes == {"step": restored.step}
    values = {float(t.flatten()[0]) for t in training.pipe.state_dict().values()}
    values |= {float(s["exp_avg"].flatten()[0]) for s in training.optimizers[0].state.values()}
    assert values == {float(restored.step)}
    return restored.step


@pytest.mark.parametrize("kind", [{"is_half": True}, {"loses": True}], ids=["half a write", "power cut"])
def test_a_crash_at_every_point_of_a_save_leaves_the_old_or_the_new_one(training, tmp_path, kind):
    old, new = (job_of(training, tmp_path, step, f"{step:09x}") for step in (1, 2))
    counting = Crashing()
    for number, job in enumerate((old, new)):
        saving = Saving(replace(job, folder=tmp_path / "count"), counting)
        saving.wait()
        assert saving.is_complete, saving.failure
        num_points = counting.count if number else (counting := Crashing()).count
    assert num_points > 40
    seen = []
    for at in range(num_points):
        folder = tmp_path / f"at {at}"
        Saving(replace(old, folder=folder), Disk()).wait()
        child = forked(lambda at=at, folder=folder: Saving(replace(new, folder=folder), Crashing(at, **kind)).wait())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9, f"point {at} was not reached"
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing half done is even tried
            seen.append(state_of(training, folder))
        assert [verify(path) for path in folder.glob("checkpoint-*")] == [[]] * len(list(folder.glob("checkpoint-*")))
        (folder / "tmp-of-the-user").touch()
        again = penstock.Checkpoints(folder, training.pipe, optimizer=training.optimizers)
        assert again.steps()[-1] == seen[-1]
        again.save(3, wait=True)
        assert [p.name for p in folder.glob("tmp-*")] == ["tmp-of-the-user"], "what was left is swept"
    assert set(seen) == {1, 2}
    assert seen == sorted(seen), "once the new one is there it stays"


def test_20_real_kills_at_random_moments(training, tmp_path):
    """A process saves step after step; wherever it is killed, the newest checkpoint is whole."""
    rng = random.Random(3)

    def save_on(first):
        for step in range(first, first + 10_000):
            Saving(
                replace(job, step=step, mark=f"{first:05x}{step:05x}", files=filled(step), state=told(step)), Disk()
            ).wait()

    job = job_of(training, tmp_path, 1, "begin", keep=2)
    shapes = {f: {n: t.numpy().copy() for n, t in ts.items()} for f, ts in job.files.items()}

    def filled(step):
        for tensors in shapes.values():
            for array in tensors.values():
                array[...] = step
        return {f: {n: torch.from_numpy(a) for n, a in ts.items()} for f, ts in shapes.items()}

    def told(step):
        return {**job.state, "step": step, "notes": {"step": step}}

    Saving(job, Disk()).wait()
    newest, left = 1, 0
    for _ in range(20):
        child = forked(lambda first=newest + 1: save_on(first))
        time.sleep(rng.uniform(0.0, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += bool(list(tmp_path.glob("tmp-*")))
        found = state_of(training, tmp_path)
        assert found >= newest
        newest = found
    assert newest > 5, "saves went on"
    assert left > 5, "kills came in the middle of saves"


def _limited(folder):
    """Save, save under a limit on the size of files, save without; the training goes on."""
    with Training(folder, lanes=2) as training:
        checkpoints = training.checkpoints
        training.run(0, 1)
        checkpoints.save(1, wait=True)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        training.run(1, 2)
        with pytest.warns(RuntimeWarning, match=r"step 2 was NOT saved.*File too large.*bytes needed: \d+, free: \d+"):
            checkpoints.save(2, wait=True)
        names = sorted(p.name for p in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        losses = training.run(2, 3)
        checkpoints.save(3, wait=True)
        return names, checkpoints.failures, checkpoints.steps(), losses


def test_a_file_that_may_not_grow_is_told_and_the_training_goes_on(tmp_path):
    ((names, failures, steps, losses),) = processes.run(_limited, 1, tmp_path)
    assert names == ["checkpoint-000001", "latest"]
    assert len(failures) == 1
    assert steps == [1, 3]
    assert losses


@pytest.fixture
def small_disk(tmp_path):
    """Return a disk of one MiB, where this user may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False, capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_last_good_one(small_disk):
    with Training(small_disk, keep_checkpoints=2) as training:
        training.run(0, 1)
        training.checkpoints.save(1, wait=True)
        filler = small_disk / "filler"
        free = os.statvfs(small_disk).f_bavail
        filler.write_bytes(bytes(os.statvfs(small_disk).f_bsize * (free - 1)))
        with pytest.warns(RuntimeWarning, match=r"NOT saved.*No space left on device.*free: \d+"):
            training.checkpoints.save(2, wait=True)
        training.run(1, 2)
        assert training.checkpoints.steps() == [1]
        assert training.checkpoints.restore().step == 1
        filler.unlink()
        training.checkpoints.save(3, wait=True)
        assert training.checkpoints.steps() == [1, 3]


def test_a_read_only_folder(small_disk):
    with Training(small_disk) as training:
        training.checkpoints.save(1, wait=True)
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.warns(RuntimeWarning, match="NOT saved.*Read-only file system"):
            training.checkpoints.save(2, wait=True)
        with Training(small_disk) as other:
            assert other.checkpoints.restore().step == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write(tmp_path):
    with Training(tmp_path) as training:
        tmp_path.chmod(0o555)
        try:
            with pytest.warns(RuntimeWarning, match="NOT saved.*Permission denied"):
                training.checkpoints.save(1, wait=True)
        finally:
            tmp_path.chmod(0o755)


def test_every_error_of_the_disk_is_told(tmp_path):
    """Wherever in a save the disk gives an error: nothing half is seen, and the next save works."""
    with Training(tmp_path, keep_checkpoints=1) as training:
        checkpoints = training.checkpoints
        checkpoints.save(1, wait=True)
        for step, name in enumerate(["make_folder", "write", "sync", "sync_folder", "replace"], 2):
            real = getattr(checkpoints._disk, name)

            def fail(*_):
                raise OSError(5, "Input/output error")

            setattr(checkpoints._disk, name, fail)
            with pytest.warns(RuntimeWarning, match=f"step {step} was NOT saved.*Input/output error"):
                checkpoints.save(step, wait=True)
            setattr(checkpoints._disk, name, real)
            assert checkpoints.steps() == [1]
            assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000001", "latest"]
        checkpoints.save(9, wait=True)
        assert checkpoints.steps() == [9]
        assert len(checkpoints.failures) == 5


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is not a folder"), Training(tmp_path / "file"):
        pass


def test_the_end_of_the_program_waits_for_the_save(tmp_path):
    """A script that ends without close() still has its checkpoint."""
    code = f"""
import torch, penstock
model = torch.nn.Sequential(torch.nn.Linear(4, 400), torch.nn.Tanh(), torch.nn.Linear(400, 1))
batch = torch.ones(6, 4)
pipe = penstock.Pipeline(model, example=batch, loss=torch.nn.MSELoss(), lanes=2, micro_batches=3, cuts=[2])
penstock.Checkpoints({str(tmp_path)!r}, pipe).save(1)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
    assert (tmp_path / "checkpoint-000001" / "MANIFEST.json").exists()
