"""Damage: whatever happens to the files of a checkpoint is noticed, named, and the one before is taken."""

import json
import os
import random
import shutil
import warnings

import pytest
import torch
from torch import nn

import penstock
from checkpoint_cases import Training, losses_of
from penstock.checkpoint.reader import faults_of
from penstock.errors import CheckpointError
from penstock.tensor_files.manifest import checksum, read_manifest, to_bytes
from penstock.tensor_files.tensor_shards import Shard
from pipelines import WIDTH, data

NEW = "checkpoint-000002"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Return a folder with good checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("original")
    with Training(folder) as training:
        for step in (1, 2):
            training.run(step - 1, step)
            training.checkpoints.save(step, wait=True)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """Return a pipeline to restore into; its checkpoints are looked for where a test says."""
    with Training(tmp_path_factory.mktemp("unused")) as made:
        yield made


def restore(training, folder, source="newest"):
    training.checkpoints.folder = folder
    return training.checkpoints.restore(source)


def goes_back(training, folder, message):
    """Restore, and see that the one before was taken, and why."""
    before = {name: t.clone() for name, t in training.pipe.state_dict().items()}
    with pytest.raises(CheckpointError):
        restore(training, folder, 2)
    assert all(torch.equal(t, before[n]) for n, t in training.pipe.state_dict().items()), "a part of it was loaded"
    with pytest.warns(RuntimeWarning, match="went back to the checkpoint of step 1"):
        restored = restore(training, folder)
    assert restored.step == 1
    assert len(restored.passed_over) == 1
    assert message in restored.passed_over[0], restored.passed_over
    return restored.passed_over[0]


def test_the_newest_is_taken_when_it_is_good(training, folder):
    assert restore(training, folder).step == 2
    assert restore(training, folder, 1).step == 1
    assert restore(training, folder, folder / NEW).step == 2
    assert restore(training, folder / "other", folder).step == 2
    assert restore(training, folder / "nothing here") is None


def test_200_random_flips_and_cuts_are_all_caught(training, folder):
    """Every byte of every file counts: flips of single bits, cuts, and runs of other bytes."""
    rng = random.Random(7)
    files = sorted((folder / NEW).iterdir())
    assert len(files) == 7
    missed, manifest = [], read_manifest(folder / NEW)
    for case in range(200):
        path = files[case % len(files)]
        good = path.read_bytes()
        at = rng.randrange(len(good))
        if case % 3 == 0:
            bad = good[:at]
        elif case % 3 == 1:
            bad = good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :]
        else:
            count = rng.randrange(1, 50)
            bad = (good[:at] + rng.randbytes(count) + good[at + count :])[: len(good)]
        if bad == good:
            bad = good + b"\0"
        path.write_bytes(bad)
        try:
            restore(training, folder, 2)
            missed.append((path.name, at, "restore"))
        except CheckpointError as error:
            if path.name not in str(error):
                missed.append((path.name, at, str(error)))
        if path.name != "MANIFEST.json" and not faults_of(manifest):
            missed.append((path.name, at, "verify"))
        path.write_bytes(good)
    assert not missed
    assert restore(training, folder).step == 2


def test_every_byte_of_a_header_counts(folder):
    """Also what says nothing of tensors: its length, the word for other readers, the blanks at its end."""
    path, entry = folder / NEW / SHARD, read_manifest(folder / NEW).files[SHARD]
    content = bytearray(path.read_bytes())
    for at in range(entry["header_bytes"]):
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="header"):
            Shard(path, entry)
        content[at] ^= 1
    path.write_bytes(content)
    Shard(path, entry).close()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "optim-00002-of-00002.safetensors"])
def test_a_flipped_bit_is_told_with_file_tensor_and_checksums(training, folder, name):
    path = folder / NEW / name
    content = bytearray(path.read_bytes())
    content[-20] ^= 16
    path.write_bytes(content)
    told = goes_back(training, folder, f"{name}: tensor ")
    stored = read_manifest(folder / NEW).files[name]["tensors"]
    tensor = told.split("tensor ")[1].split(" ")[0]
    assert f"expected {stored[tensor]['xxh3']}" in told


def _delete(path):
    path.unlink()


def _empty(path):
    path.write_bytes(b"")


def _link(path):
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _directory(path):
    path.unlink()
    path.mkdir()


def _of_another_step(path):
    shutil.copy(path.parent.parent / "checkpoint-000001" / path.name, path)


@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("harm", [_delete, _empty, _link, _pipe, _directory, _of_another_step])
def test_files_that_are_gone_or_something_else(training, folder, file, harm):
    harm(folder / NEW / file)
    goes_back(training, folder, "MANIFEST.json" if file == "MANIFEST.json" else "")


def test_a_whole_folder_of_another_step_is_not_taken_for_this_one(training, folder):
    shutil.rmtree(folder / NEW)
    shutil.copytree(folder / "checkpoint-000001", folder / NEW)
    with pytest.warns(RuntimeWarning, match="MANIFEST.json: belongs to step 1"):
        assert restore(training, folder).step == 1


def rewrite(folder, change):
    """Change a manifest, and give it the right checksum: anyone can."""
    path = folder / NEW / "MANIFEST.json"
    plain = json.loads(path.read_bytes())
    plain.pop("xxh3")
    change(plain)
    path.write_bytes(to_bytes({**plain, "xxh3": checksum(to_bytes(plain))}))


def _rename(name):
    def change(plain):
        plain["files"][name] = plain["files"].pop(SHARD)

    return change


def _set(*keys, value):
    def change(plain):
        for key in keys[:-1]:
            plain = plain[key]
        plain[keys[-1]] = value

    return change


def _tensor(dtype, shape):
    return _set("files", SHARD, "tensors", "0.weight", value={"dtype": dtype, "shape": shape, "xxh3": "0" * 32})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rename("../" + SHARD), "is not a valid file name"),
        (_rename("/etc/passwd"), "is not a valid file name"),
        (_rename(".."), "is not a valid file name"),
        (_rename(""), "is not a valid file name"),
        (_rename("model-a b"), "is not a valid file name"),
        (_set("files", SHARD, "bytes", value=1 << 80), "not a whole number"),
        (_set("files", SHARD, "bytes", value=1 << 50), "bytes, expected"),
        (_set("files", SHARD, "header_bytes", value=1 << 50), "its header cannot have"),
        (_set("files", SHARD, "header_bytes", value=-1), "no valid list of tensors"),
        (_tensor("F64", [1 << 40]), "contradicts"),
        (_tensor("F64", [-1]), "invalid dtype"),
        (_tensor("PICKLE", []), "invalid dtype"),
        (_set("files", SHARD, "tensors", value=[]), "no valid list of tensors"),
        (_set("files", value={}), "state.json"),
        (_set("step", value=3), "step"),
        (_set("step", value="2"), "whole number"),
        (_set("version", value=2), "has version 2"),
        (_set("form", value="other"), "is not the manifest"),
    ],
)  # fmt: skip
def test_manifests_that_say_what_cannot_be(training, folder, change, message):
    rewrite(folder, change)
    goes_back(training, folder, message)


def test_bombs_of_json(training, folder):
    path = folder / NEW / "MANIFEST.json"
    for content in (b"[" * 1_000_000, b'{"a":' * 100_000, b'{"step": ' + b"9" * 100_000 + b"}", b'"text"', b"\xff{}"):
        path.write_bytes(content)
        goes_back(training, folder, "MANIFEST.json")
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no room, and would take all memory
    goes_back(training, folder, "too large for this kind of file")


def test_a_header_that_says_more_than_the_file_has(training, folder):
    """The manifest agrees with it: only sizes are left to tell."""
    path = folder / NEW / SHARD
    content = path.read_bytes()
    for length in (1 << 63, len(content) * 2, 0):
        head = length.to_bytes(8, "little") + content[8:]
        path.write_bytes(head)
        goes_back(training, folder, SHARD)


def test_only_bad_ones_are_an_error_that_tells_all(training, folder):
    for step in (1, 2):
        (folder / f"checkpoint-00000{step}" / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints is good.*000002/state.json.*000001/state.json"):
        restore(training, folder)


@pytest.mark.parametrize(
    ("source", "message"), [(7, "no checkpoint of step 7; existing steps: 1, 2"), ("x", "no such folder")]
)
def test_one_that_is_asked_for_must_be_there(training, folder, source, message):
    with pytest.raises(CheckpointError, match=message):
        restore(training, folder, source)
    (folder / "empty").mkdir()
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        restore(training, folder, folder / "empty")


def test_another_model_is_refused_with_the_names(folder):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2), nn.Tanh()).double()
    model.extra = nn.Linear(1, 1)
    with penstock.Pipeline(
        model[:4], example=data(8)[0], loss=lambda o, t: o.sum(), lanes=2, micro_batches=4, cuts=[2]
    ) as pipe, penstock.Checkpoints(folder, pipe) as checkpoints:  # fmt: skip
        with pytest.raises(
            CheckpointError, match=r"another model.*not in the model: 10\.bias.*shape: 2\.bias: \(6,\), not \(2,\)"
        ):
            checkpoints.restore()
        with pytest.raises(CheckpointError, match="another model"):
            checkpoints.restore(1)


def test_other_groups_of_parameters_are_refused_and_older_ones_not_tried(folder):
    with Training(folder, optimizer="sgd") as training:
        training.run(2, 3)
        training.checkpoints.save(3, wait=True)
        one = torch.optim.SGD(training.pipe.parameters(), lr=0.1)
        checkpoints = penstock.Checkpoints(folder, training.pipe, optimizer=one)
        with pytest.raises(
            CheckpointError, match="optimizer 0, group 0: its parameters were saved in groups with different options"
        ):
            checkpoints.restore()
        fewer = torch.optim.SGD(list(training.pipe.parameters())[:2], lr=0.1)
        penstock.Checkpoints(folder, training.pipe, optimizer=fewer).save(4, wait=True)
        with pytest.raises(CheckpointError, match="the checkpoint lacks"):
            checkpoints.restore(4)


def test_a_step_that_is_there_is_not_saved_again_and_a_bad_one_is_moved_aside(folder):
    with Training(folder) as training:
        training.checkpoints.restore()
        (manifest,) = (folder / NEW).glob("MANIFEST.json")
        before = manifest.stat().st_mtime_ns
        training.checkpoints.save(2, wait=True)
        assert manifest.stat().st_mtime_ns == before
        (folder / NEW / "state.json").write_bytes(b"{}")
        training.checkpoints.save(2, wait=True)
        assert training.checkpoints.steps() == [1, 2]
        assert not faults_of(read_manifest(folder / NEW))
        (aside,) = folder.glob("aside-000002-*")
        assert (aside / "state.json").read_bytes() == b"{}"


def test_a_step_of_someone_else_is_not_saved_over(folder):
    with Training(folder) as training:
        with pytest.warns(RuntimeWarning, match="already exists, and this training neither saved nor restored it"):
            training.checkpoints.save(2)
        assert training.checkpoints.steps() == [1, 2]


def test_going_on_from_an_older_one_makes_the_newest(folder):
    """What was made after the checkpoint that was taken up belongs to a past that was left."""
    with Training(folder) as training:
        training.checkpoints.restore(1)
        training.run(5, 6)
        wanted = {name: t.clone() for name, t in training.pipe.state_dict().items()}
        training.checkpoints.save(2, notes={"way": "other"}, wait=True)
    with Training(folder) as training:
        assert training.checkpoints.restore().notes == {"way": "other"}
        assert all(torch.equal(t, wanted[n]) for n, t in training.pipe.state_dict().items())
    (folder / "checkpoint-000009").mkdir()
    with Training(folder) as training:
        with pytest.warns(RuntimeWarning, match="checkpoint-000009"):
            training.checkpoints.restore()
        training.checkpoints.save(3, wait=True)
        assert training.checkpoints.steps() == [1, 2, 3]


def test_old_ones_are_deleted_and_the_newest_kept(tmp_path):
    with Training(tmp_path, keep_checkpoints=2) as training:
        told = []
        training.checkpoints.on_saved = lambda step, folder: told.append((step, folder.is_dir()))
        for step in range(1, 6):
            training.checkpoints.save(step)
        training.checkpoints.wait()
        assert told == [(step, True) for step in range(1, 6)]
        assert training.checkpoints.steps() == [4, 5]
        assert training.checkpoints.folders() == [tmp_path / "checkpoint-000004", tmp_path / "checkpoint-000005"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-000004", "checkpoint-000005", "latest"]
        assert (tmp_path / "latest").read_text() == "checkpoint-000005\n"


def test_links_are_not_followed(training, folder, tmp_path):
    (folder / "checkpoint-000003").symlink_to(folder / NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restore(training, folder).step == 2


def test_the_same_losses_after_going_back(folder):
    (folder / NEW / SHARD).write_bytes(b"")
    wanted = losses_of(folder / "unused", 0, 3)[1:]
    with Training(folder) as training:
        with pytest.warns(RuntimeWarning, match="went back"):
            training.checkpoints.restore()
        assert training.run(1, 3) == pytest.approx(wanted, rel=1e-10)
