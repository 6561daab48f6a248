"""Races on a GPU: torch's sanitizer finds none in our runs, and does find those that are there."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TOP = Path(__file__).resolve().parents[2]

TRAIN = """
    import torch, penstock
    from torch import nn
    from penstock.devices.cuda_streams import CudaStreams

    def train(schedule, **options):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
        x, target = torch.randn(16, 64, device="cuda"), torch.randn(16, 64, device="cuda")
        schedule = penstock.schedules.build(schedule, lanes=2, micro_batches=4)
        cuts = [8 * k // schedule.num_stages for k in range(1, schedule.num_stages)]
        with penstock.Pipeline(model, example=x, loss=nn.functional.mse_loss, schedule=schedule, cuts=cuts,
                               devices=["cuda:0"] * 2, **options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for _ in range(4):
                loss = pipe.step(x, target)
                optimizer.step()
                optimizer.zero_grad()
            return float(loss)
"""


def run_sanitized(*scripts):
    """Run a script in a process of its own, with the sanitizer on."""
    env = os.environ | {"TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": f"{TOP / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    code = "\n".join(textwrap.dedent(script) for script in scripts)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, timeout=250
    )
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.parametrize("graphs", [False, True])
def test_our_runs_are_clean(graphs):
    code, told = run_sanitized(
        TRAIN,
        f"""
        for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v"):
            for keep in ("hold", "recompute"):
                train(schedule, keep=keep, graphs={graphs})
        print("clean")
        """,
    )
    assert code == 0, f"{told[:4000]}\n…\n{told[-1500:]}"
    assert "clean" in told


@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_runs_are_clean(graphs):
    """Of compiled code it sees what Inductor leaves to torch, as products of matrices."""
    code, told = run_sanitized(
        TRAIN,
        f"""
        from torch._dynamo.utils import counters
        for schedule in ("1f1b", "zb_h1"):
            train(schedule, compile=True, graphs={graphs})
        print("graphs compiled:", counters["stats"]["unique_graphs"])
        """,
    )
    assert code == 0, f"{told[:4000]}\n…\n{told[-1500:]}"
    assert re.search(r"graphs compiled: [1-9]", told), told[-1500:]


@pytest.mark.parametrize("compile", [False, True])
def test_a_hand_over_that_does_not_wait_is_found(compile):  # noqa: A002 - as the pipeline calls it
    """The sanitizer looks at the lanes' threads too: with the event behind a value left out, it says so."""
    code, told = run_sanitized(
        TRAIN,
        f"""
        CudaStreams.mark = lambda self: self.event()  # never recorded, so nobody waits
        train("1f1b", graphs=False, compile={compile})
        """,
    )
    assert code != 0
    assert "data race" in told


def test_the_sample_of_a_fresh_stream_for_every_phase_is_found():
    """As tutorials show it: each phase of a step in a stream of its own, and no phase waits for the one before."""
    code, told = run_sanitized(
        """
        import torch
        from torch import nn

        layers = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 32 * 32, 10)
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        inputs, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
        for _ in range(2):
            x, y = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
            with torch.cuda.stream(torch.cuda.Stream()):
                loss = nn.functional.cross_entropy(model(x), y)
            with torch.cuda.stream(torch.cuda.Stream()):
                loss.backward()
            with torch.cuda.stream(torch.cuda.Stream()):
                optimizer.step()
                optimizer.zero_grad()
        """
    )
    assert code != 0
    assert "data race" in told
