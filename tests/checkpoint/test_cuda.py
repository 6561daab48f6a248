"""Checkpoints of a GPU: copied to pinned memory behind what its stream was given, without a wait of the host."""

import pytest
import torch
from torch import nn

import penstock
from pipelines import WIDTH

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def make(devices):
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double()
    batch = torch.randn(8, WIDTH, dtype=torch.float64)
    pipe = penstock.Pipeline(
        model, example=batch, loss=nn.functional.mse_loss, devices=devices, micro_batches=4, cuts=[4]
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def run(pipe, optimizer, begin, end):
    losses = []
    for step in range(begin, end):
        generator = torch.Generator().manual_seed(step)
        batch, target = (torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        losses.append(float(pipe.step(batch.to(pipe.devices[0]), target.to(pipe.devices[-1]))))
        optimizer.step()
    return losses


def test_a_gpu_and_the_cpu_take_up_what_the_other_saved(tmp_path):
    for first, second in ((["cuda:0"] * 2, ["cpu"] * 2), (["cpu"] * 2, ["cuda:0"] * 2), (["cuda:0"] * 2,) * 2):
        folder = tmp_path / f"{first[0][:3]} {second[0][:3]}"
        pipe, optimizer = make(first)
        with pipe, penstock.Checkpoints(folder, pipe, optimizer=optimizer) as checkpoints:
            run(pipe, optimizer, 0, 3)
            checkpoints.save(3)
            wanted = run(pipe, optimizer, 3, 6)  # while it is copied and written
            checkpoints.wait()
            assert not checkpoints.failures
        pipe, optimizer = make(second)
        with pipe, penstock.Checkpoints(folder, pipe, optimizer=optimizer) as checkpoints:
            assert checkpoints.restore().step == 3
            assert run(pipe, optimizer, 3, 6) == pytest.approx(wanted, rel=1e-10)


def test_the_host_does_not_wait_for_the_copy(tmp_path):
    """A save behind a second of work on the GPU returns before that is done, and holds what comes out of it."""
    pipe, optimizer = make(["cuda:0"] * 2)
    with pipe, penstock.Checkpoints(tmp_path, pipe, optimizer=optimizer) as checkpoints:
        run(pipe, optimizer, 0, 1)
        checkpoints.save(1, wait=True)  # the memory is there now
        done = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)
        parameter = next(iter(pipe.parameters()))
        with torch.no_grad():
            parameter.fill_(7.0)
        done.record()
        checkpoints.save(2)
        assert not done.query()
        with torch.no_grad():
            parameter.fill_(8.0)
        checkpoints.wait()
        checkpoints.restore()
        assert parameter.unique().item() == 7.0


def test_the_generator_of_the_gpu_goes_on(tmp_path):
    pipe, optimizer = make(["cuda:0"] * 2)
    with pipe, penstock.Checkpoints(tmp_path, pipe, optimizer=optimizer) as checkpoints:
        checkpoints.save(1, wait=True)
        wanted = torch.rand(3, device="cuda:0")
        checkpoints.restore()
        assert torch.equal(torch.rand(3, device="cuda:0"), wanted)
