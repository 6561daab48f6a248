"""penstock doctor: what it says of a script, how it stops it, and what it says to wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

import commands

TRAINING = """
import sys

import torch
from beside import width
from torch import nn

assert __name__ == "__main__"
print("words", sys.argv[1:])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(width, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.ones(2, width, device=device)
for number in range(100):
    try:
        loss = model(data).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    except Exception:  # a script may
        pass
    {line}
print("the end")
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "beside.py").write_text("width = 4\n")

    def write(line):
        path = tmp_path / "train.py"
        path.write_text(TRAINING.replace("{line}", line))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Each script has its own module beside it, and lines are not broken."""
    monkeypatch.setenv("COLUMNS", "300")
    yield
    sys.modules.pop("beside", None)


def penstock(*words):
    return commands.penstock("doctor", *words)


def test_it_tells_the_line_and_stops_the_script(script):
    words, folders = list(sys.argv), list(sys.path)
    code, out, _ = penstock("--steps", 5, script("value = loss.item()"), "--lr", "3", "--steps")
    assert code == 0
    assert "words ['--lr', '3', '--steps']" in out
    assert "the end" not in out
    assert "train.py:22: reads a value; 1 per step" in out
    assert "    value = loss.item()" in out
    assert (sys.argv, sys.path) == (words, folders)
    if not torch.cuda.is_available():
        assert "There is no GPU, so synchronisations cost nothing" in out


def test_json(script):
    code, out, err = penstock("--json", "--steps", 5, script("value = loss.item()"))
    assert code == 0
    data = json.loads(out)
    assert "words []" in err  # what the script prints does not come in between
    (finding,) = data["findings"]
    assert finding["kind"] == "item"
    assert finding["place"].endswith("train.py:22")
    assert finding["code"] == "value = loss.item()"
    assert finding["per_step"] == 1
    assert data["error"] is None


def test_a_clean_script_is_clean(script):
    code, out, _ = penstock("--steps", 5, "--check", script("pass"))
    assert code == 0
    assert "Nothing found in 3 steps" in out


def test_check_is_for_ci(script):
    path = script("value = loss.item()")
    assert penstock("--steps", 5, path)[0] == 0
    assert penstock("--steps", 5, "--check", path)[0] == 1


def test_check_is_not_content_with_a_script_that_does_not_train(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("pass\n")
    assert penstock(path)[0] == 0
    code, out, _ = penstock("--check", path)
    assert code == 1
    assert "no whole step ran" in out


def test_a_script_that_ends_by_itself(script):
    code, out, _ = penstock("--steps", 1000, script("value = loss.item()"))
    assert code == 0
    assert "the end" in out
    assert "reads a value" in out
    assert penstock("--steps", 5, script("sys.exit(0)"))[0] == 0


def test_an_error_of_the_script_is_its_own_and_what_was_found_is_told(script):
    line = "value = loss.item()\n    if number == 4:\n        model(torch.ones(3, device=device))"
    code, out, err = penstock("--steps", 20, script(line))
    assert code == 1
    assert err.startswith("Traceback (most recent call last):\n  File ")
    first = err.splitlines()[1]
    assert first.endswith('train.py", line 24, in <module>')
    assert "RuntimeError: " in err
    assert "penstock/doctor" not in err
    assert "runpy" not in err
    assert "train.py:22: reads a value" in out
    code, out, _ = penstock("--steps", 20, "--json", script(line))
    assert code == 1
    assert json.loads(out)["error"].startswith("RuntimeError: ")


def test_exit_codes_of_the_script(script):
    code, _, err = penstock("--steps", 20, script("sys.exit(3)"))
    assert code == 1
    assert "train.py exited with 3" in err
    code, out, err = penstock("--steps", 20, script("raise KeyboardInterrupt"))
    assert code == 130
    assert "Stopped by Ctrl-C" in err
    assert "No step" in out or "warm-up" in out


def test_a_script_that_is_no_python(script, tmp_path):
    (tmp_path / "broken.py").write_text("for\n")
    code, out, err = penstock(tmp_path / "broken.py")
    assert code == 1
    assert "SyntaxError" in err
    assert "Nothing found (no whole step ran)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "none.py: no such file"),
        (["."], "is a folder"),
    ],
)
def test_wrong_input_gets_one_message_and_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = penstock(*words)
    assert code == 2
    assert message in err
    assert "\n" not in err
    assert out == ""


@pytest.mark.parametrize("words", [[], ["--steps", "2", "x.py"], ["--stepz", "2", "x.py"]])
def test_wrong_options_get_exit_code_2(words):
    assert penstock(*words)[0] == 2


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_cannot_be_read(script, tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    path.chmod(0)
    assert "cannot be read" in penstock(path)[2]


def test_help_and_wrong_input_leave_torch_alone():
    """Torch takes seconds to import."""
    for words in ("['doctor', '--help']", "['doctor', 'none.py']"):
        code = f"import sys; sys.argv = ['penstock', *{words}]; from penstock.cli.main import run\n"
        code += "try: run()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split()[-2:] == ["0" if "help" in words else "2", "False"], run.stdout


SPAWNING = """
import torch
from torch.utils.data import DataLoader


def main():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(5):
        for batch in DataLoader([1.0, 2.0], num_workers=1, multiprocessing_context="spawn"):
            (weight * batch).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_the_command_itself(tmp_path):
    """A real process; workers that are spawned read the script again, as they would under python."""
    (tmp_path / "spawning.py").write_text(SPAWNING)
    run = [sys.executable, "-c", "from penstock.cli.main import run; run()", "doctor", "--steps", "3", "--json"]
    done = subprocess.run([*run, "spawning.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["steps"] == 1
    assert {finding["kind"] for finding in found["findings"]} <= {"data_loader"}
