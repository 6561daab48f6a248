"""The wheel as users install it, in an environment of its own: error tests, the README's Python and the examples."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow
# without the folders in which this process may find the sources, and without what its own pytest has left there
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "PYTEST", "COV"))
}


def call(*words, folder, environment=ENVIRONMENT):
    """Return what a command prints, both streams."""
    done = subprocess.run(
        list(map(str, words)), cwd=folder, env=environment, check=False, timeout=280, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the Python of an environment that has the wheel, and beside it only what Penstock and the tests need."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    build = ("wheel", ROOT, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    call(*pip, *build, folder=folder, environment=os.environ)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    call(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, folder=folder)
    own = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    # A folder named in a .pth file is searched after the environment's own, and its own .pth files are not read:
    # the dependencies of this process are found, the editable Penstock that it may have is not.
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parent.parent)}
    (own / "dependencies.pth").write_text("\n".join(sorted(shared)) + "\n")
    return python


def test_penstock_is_the_wheels(installed, tmp_path):
    file = call(installed, "-c", "import penstock; print(penstock.__file__)", folder=tmp_path).strip()
    assert Path(file).is_relative_to(installed.parent.parent)
    assert "site-packages" in file


def test_the_command_is_installed(installed, tmp_path):
    assert "1f1b" in call(installed.parent / "penstock", "simulate", "--schedule", "1f1b", folder=tmp_path)


@pytest.mark.parametrize(
    "tests",
    [
        ("tests/model/test_source.py",),
        ("tests/runtime/lanes/test_failing.py", "-k", "exception_names"),
        ("tests/test_docs.py::test_python_runs[README.md]",),
        (
            "tests/test_examples.py",
            "-k",
            "(test_train_gpt and not same_losses) or on_digits or (plain_loop and threads) or resnet50",
        ),
    ],
    ids=["lines", "failing", "readme", "examples"],
)
def test_the_suite_passes_with_the_wheel(installed, tests):
    """An installed Penstock lies in site-packages: its errors named its own lines."""
    out = call(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, folder=ROOT)
    assert "passed" in out
    assert "skipped" not in out
