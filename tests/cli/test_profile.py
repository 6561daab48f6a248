"""penstock profile: what it prints and writes, and what it says to wrong input."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.errors import PenstockError

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x + first


def build():
    return Net(), torch.zeros(4, 16)


def bare():
    return Net()


number = 3
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "net_of_tests.py"
    path.write_text(MODEL)
    return f"{path}:build"


def penstock(*words):
    """Run the command in this process; errors of ours come back as the message and code that run() makes of them."""
    result = CliRunner().invoke(app, ["profile", *map(str, words)])
    if isinstance(result.exception, PenstockError):
        return 2, "", f"Error: {result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_it_prints_the_stages_the_balance_and_the_step(net):
    code, out, err = penstock(net, "--lanes", 3, "--analytic", "cpu")
    assert code == 0
    assert err == ""
    for word in ("captured by export", "stage  lane  modules", "layers.", "↓ cut at", "balance:", "predicted step:"):
        assert word in out


def test_json_has_the_figures_and_nothing_else(net, tmp_path):
    page, timeline = tmp_path / "net.html", tmp_path / "step.html"
    words = ["--lanes", 2, "--analytic", "h100", "--json", "--html", page, "--timeline", timeline]
    code, out, err = penstock(net, *words, "--schedule", "zb_v", "--bandwidth", "25GB/s", "--latency", "10us")
    assert code == 0
    assert err == ""
    found = json.loads(out)
    assert found["schedule"] == "zb_v"
    assert len(found["stages"]) == 4
    assert found["capture"]["path"] == "export"
    assert found["profile"] == {"method": "analytic", "device": "NVIDIA H100 SXM5", "batch_size": 4}
    assert found["written"] == {"page": str(page), "timeline": str(timeline)}
    assert "<canvas" in page.read_text() or "canvas" in page.read_text()
    assert timeline.exists()


def test_a_saved_profile_is_used_again(net, tmp_path):
    saved = tmp_path / "profile.json"
    code, first, _ = penstock(net, "--lanes", 2, "--save", saved, "--json")
    assert code == 0
    code, second, _ = penstock(net, "--lanes", 2, "--load", saved, "--json")
    assert code == 0
    first, second = json.loads(first), json.loads(second)
    assert first["profile"]["method"] == "measured"
    assert first["stages"] == second["stages"]
    code, _, err = penstock("gpt2", "--load", saved)
    assert code == 2
    assert "was measured for another graph" in err


def test_options_reach_the_explanation(net, tmp_path):
    words = ["--analytic", "cpu", "--lanes", 3, "--micro-batches", 5, "--batch-size", 2, "--keep", "recompute"]
    words += [
        "--cuts",
        "layers.1,12",
        "--eval",
        "--capture",
        "export",
        "--optimizer-bytes",
        0,
        "--memory-limit",
        "1MiB",
    ]
    code, out, _ = penstock(net, *words, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["micro_batches"], found["keep"], found["profile"]["batch_size"]) == (5, "recompute", 2)
    assert 12 in found["cuts"]
    assert found["stages"][0]["optimizer_bytes"] == 0
    assert found["lanes"][0]["limit_bytes"] == 2**20
    CliRunner().invoke(app, ["simulate", "--csv", str(tmp_path / "s.csv"), "--lanes", "2", "--micro-batches", "3"])
    code, out, _ = penstock(net, "--analytic", "cpu", "--schedule", tmp_path / "s.csv", "--json")
    assert (json.loads(out)["micro_batches"], len(json.loads(out)["lanes"])) == (3, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lanes", "0"], "lanes: 0"),
        (["--lanes", "99"], "request fewer stages"),
        (["--micro-batches", "-1"], "micro_batches: -1"),
        (["--schedule", "1f1c"], "Did you mean '1f1b'"),
        (["--schedule", "none.csv"], "none.csv: cannot be read"),
        (["--stages-per-lane", "2"], "leave stages_per_lane out"),
        (["--batch-size", "0"], "batch_size: 0"),
        (["--keep", "hodl"], "Did you mean 'hold'"),
        (["--capture", "reply"], "Did you mean 'replay'"),
        (["--analytic", "h10"], "Did you mean 'h100'"),
        (["--load", "x.json"], "--load and --analytic: each of them defines the times"),
        (["--device", "cpu"], "--analytic and --device"),
        (["--analytic", "", "--device", "cuda:77"], "--device: nothing can be measured on 'cuda:77'"),
        (["--analytic", "", "--device", "toaster"], "--device: nothing can be measured on 'toaster'"),
        (["--analytic", "", "--device", "meta"], "--device: nothing can be measured on 'meta'"),
        (["--analytic", "", "--load", "none.json"], "none.json: cannot be read"),
        (["--memory-limit", "1KiB"], "no cuts fit the memory"),
        (["--memory-limit", "lots"], "--memory-limit: 'lots' is not a number"),
        (["--memory-limit", "1GiB,1GiB"], "one per lane; lanes: 4"),
        (["--bandwidth", "fast"], "--bandwidth: 'fast' is not a number"),
        (["--bandwidth", "1,2"], "--bandwidth and --latency: pass one number"),
        (["--latency", "-1"], "latency_seconds: -1.0"),
        (["--optimizer-bytes", "nan"], "optimizer_bytes: nan"),
        (["--cuts", "layers.9"], "no node or module 'layers.9'"),
        (["--cuts", "1,2,3,4"], "4 stages have 3"),
        (["--html", "/no/such/folder/x.html"], "cannot be written"),
        (["--html", "x", "--save", "x"], "the same path"),
    ],
)
def test_wrong_options_get_one_message_and_exit_code_2(net, words, message):
    code, out, err = penstock(net, "--analytic", "cpu", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert "\n" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gtp2", "Did you mean 'gpt2'"),
        ("no_such_module:build", "no module 'no_such_module'"),
        ("no_such_file.py:build", "no file no_such_file.py"),
        ("{file}:biuld", "Did you mean 'build'"),
        ("{file}:number", "not a function"),
        ("{file}:bare", "has no example"),
    ],
)
def test_wrong_models_get_one_message_and_exit_code_2(net, name, message):
    code, out, err = penstock(name.format(file=net.removesuffix(":build")), "--analytic", "cpu")
    assert code == 2
    assert message in err
    assert out == ""


def test_help_and_the_package_leave_torch_alone():
    """Torch takes seconds to import: what needs no model must not wait for it."""
    for words in (["--help"], ["profile", "--help"], ["simulate", "--list"]):
        code = f"import sys; sys.argv = ['penstock', *{words}]; from penstock.cli.main import app\n"
        code += "try: app()\nexcept SystemExit: pass\n"
        code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.split()[-2:] == ["False", "False"], words
    code = "import sys, penstock; print(penstock.explain, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "False"


def test_wrong_options_are_told_without_torch():
    code = "import sys; sys.argv = ['penstock', 'profile', 'gpt2', '--schedule', 'nope']\n"
    code += "from penstock.cli.main import run\n"
    code += "try: run()\nexcept SystemExit as end: print(end.code, 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["2", "False"]
    assert run.stderr.startswith("Error: unknown schedule 'nope'")
