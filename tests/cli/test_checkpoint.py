"""penstock checkpoint: what it prints, what it writes, and its exit codes."""

import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file

import commands
from checkpoint_cases import Training


def penstock(*words):
    """Run `penstock checkpoint ...`; return its exit code and what it printed."""
    done = commands.penstock("checkpoint", *words)
    return done.code, done.out or done.err


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    with Training(folder, model="odd") as training:
        for step in (1, 2):
            training.run(step - 1, step)
            training.checkpoints.save(step, notes={"from": "\x1b[31m"}, wait=True)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run")


def harm(folder, step):
    path = folder / f"checkpoint-00000{step}" / "model-00001-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_inspect_tells_step_plan_tensors_and_versions(folder):
    code, out = penstock("inspect", folder)
    assert code == 0
    for word in ("step 2", "schedule: 1f1b", "lanes: 2", "model-00001-of-00002.safetensors", "torch 2.", "last.weight"):
        assert word in out
    assert "\x1b" not in out
    code, out = penstock("inspect", folder / "checkpoint-000001", "--tensors")
    assert "step 1" in out
    assert "first.weight: F64 [6, 6]" in out
    assert "first.weight/exp_avg: F64 [6, 6]" in out
    code, out = penstock("inspect", folder, "--json")
    told = json.loads(out)
    assert told["step"] == 2
    assert told["plan"]["micro_batches"] == 4
    assert {file["name"] for file in told["files"]} >= {"state.json", "optim-00002-of-00002.safetensors"}
    code, out = penstock("inspect", folder, "--all", "--json")
    assert [one["step"] for one in json.loads(out)] == [1, 2]
    assert "step 1" in penstock("inspect", folder, "--step", "1")[1]


def test_verify_says_ok_or_what_is_wrong(folder):
    assert penstock("verify", folder) == (0, f"{folder}/checkpoint-000002: OK\n")
    harm(folder, 1)
    assert penstock("verify", folder)[0] == 0
    code, out = penstock("verify", folder, "--all")
    assert code == 65
    assert "checkpoint-000001: damaged" in out
    assert "checkpoint-000002: OK" in out
    assert "model-00001-of-00002.safetensors: tensor " in out
    code, out = penstock("verify", folder, "--step", "1", "--json")
    assert code == 65
    assert "expected" in json.loads(out)["faults"][0]
    (folder / "checkpoint-000002" / "MANIFEST.json").unlink()
    code, out = penstock("verify", folder)
    assert code == 65
    assert "MANIFEST.json" in out


def test_export_and_import(folder, tmp_path):
    target = tmp_path / "model.safetensors"
    code, out = penstock("export", folder, target, "--form", "safetensors", "--json")
    assert code == 0
    assert json.loads(out)["tensors"] == len(load_file(target))
    assert penstock("export", folder, target, "--form", "safetensors")[0] == 2
    assert penstock("export", folder, target, "--form", "safetensors", "--force")[0] == 0
    for form in ("huggingface", "dcp"):
        assert penstock("export", folder, tmp_path / form, "--form", form, "--step", "1")[0] == 0
    for number, source in enumerate([target, tmp_path / "huggingface", tmp_path / "dcp"]):
        code, out = penstock("import", source, tmp_path / "other", "--step", number)
        assert code == 0, out
    assert penstock("verify", tmp_path / "other", "--all")[1].count("OK") == 3
    assert "it was imported" in penstock("inspect", tmp_path / "other")[1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["inspect", "nothing"], 65, "no such folder"),
        (["verify", "{run}/.."], 65, "contains no checkpoint"),
        (["inspect", "{run}", "--step", "7"], 65, "no checkpoint of step 7; existing steps: 1, 2"),
        (["inspect", "{run}/checkpoint-000001", "--all"], 65, "is a single checkpoint"),
        (["export", "{run}", "x", "--form", "onnx"], 2, ""),
        (["import", "nothing", "x"], 65, "no such file"),
        (["import", "{run}/checkpoint-000001", "x"], 2, "already"),
    ],
)
def test_wrong_words(folder, words, code, message):
    found = penstock(*(word.replace("{run}", str(folder)) for word in words))
    assert found[0] == code
    assert message in found[1]


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("source", "target", "form", "message"),
    [
        ("run", "run", "huggingface", "overlaps"),
        ("run", ".", "huggingface", "give the name of a new folder"),
        ("run", "/", "dcp", "give the name of a new folder"),
        ("run", "..", "safetensors", "give the name of a new file"),
        ("run", "run/..", "safetensors", "give the name of a new file"),
        ("run/checkpoint-000002", "run/checkpoint-000002", "dcp", "overlaps"),
        ("run", "{here}", "huggingface", "overlaps"),
        ("run", "link", "huggingface", "overlaps"),
        ("run", "run/checkpoint-000002/model.safetensors", "safetensors", "overlaps"),
        ("run", "run/checkpoint-000001", "huggingface", "belongs to a training"),
        ("run", "run/checkpoint-000001/x", "huggingface", "belongs to a training"),
        ("run", "run/checkpoint-000009", "huggingface", "belongs to a training"),
        ("run", "run/latest", "safetensors", "belongs to a training"),
        ("run", "mine", "safetensors", "is a folder, but safetensors writes a file"),
        ("run", "mine", "huggingface", "contains files that no export writes (notes.txt)"),
    ],
)
def test_an_export_takes_the_place_of_nothing_but_an_export(
    folder, tmp_path, monkeypatch, source, target, form, message
):
    """With --force it deleted the run that it exported from, and any folder whose name was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    (tmp_path / "link").symlink_to(folder)
    before = files_of(tmp_path)
    code, out = penstock("export", source, target.replace("{here}", str(tmp_path)), "--form", form, "--force")
    assert code == 2
    assert message in out
    assert files_of(tmp_path) == before
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("form", ["huggingface", "dcp", "safetensors"])
def test_an_export_takes_the_place_of_an_earlier_one(folder, tmp_path, form):
    for target in (tmp_path / "out", folder / "out"):
        assert penstock("export", folder, target, "--form", form)[0] == 0
    assert penstock("export", folder, tmp_path / "out", "--form", form, "--force")[0] == 0
    copied = shutil.copytree(folder / "checkpoint-000001", tmp_path / "checkpoint-000001")
    assert penstock("export", copied, tmp_path / "out", "--form", form, "--force")[0] == 0


def test_a_run_whose_name_begins_like_a_checkpoint(folder, tmp_path):
    for name in ("checkpoint-experiments", "checkpoint-000123"):
        run = shutil.copytree(folder, tmp_path / name)
        code, out = penstock("inspect", run)
        assert code == 0
        assert "step 2" in out
    (run / "checkpoint-000002" / "MANIFEST.json").unlink()
    assert "MANIFEST.json" in penstock("inspect", run / "checkpoint-000002")[1]


def test_the_real_command_exits_with_65_and_one_line(folder):
    harm(folder, 2)
    command = [sys.executable, "-m", "penstock", "checkpoint"]
    done = subprocess.run([*command, "export", folder, folder / "x"], check=False, capture_output=True, text=True)
    assert done.returncode == 65
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert not (folder / "x").exists()


def test_help_has_examples_and_needs_no_torch():
    code = "import sys\nfrom penstock.cli.main import app\n"
    for words in ("['checkpoint', '--help']", *(f"['checkpoint', '{w}', '--help']" for w in ("inspect", "import"))):
        code += f"try: app({words})\nexcept SystemExit as end: assert not end.code\n"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.count("Examples") == 2
