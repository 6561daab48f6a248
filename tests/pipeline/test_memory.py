"""Memory: what lanes are seen to hold is what the simulator says that they hold."""

import pytest
import torch
from torch import nn

import penstock
from cases import build_or_none
from penstock.schedules import lower

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "hanayo", "dualpipe"]


@pytest.mark.parametrize("keep", ["hold", "recompute", "except_last"])
@pytest.mark.parametrize("name", NAMES)
def test_the_measured_peak_is_the_simulated_one(name, keep):
    """Saved tensors are counted while they live, not by what a schedule promises."""
    schedule = build_or_none(name, 4, 8)
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Linear(32, 32), nn.Tanh(), *([nn.Linear(32, 32)] * (1 + index % 2)))
        for index in range(schedule.num_stages)
    ]
    batch = torch.randn(8 * 4, 32)
    with penstock.Pipeline(
        stages, example=batch, loss=lambda o: (o * o).sum(), schedule=schedule, cuts=range(1, len(stages)), keep=keep
    ) as pipe:
        pipe.step(batch)
        with pipe.record(memory=True) as measured:
            pipe.step(batch)
    costs = penstock.Costs(
        saved_bytes=measured.saved_bytes, pending_bytes=measured.pending_bytes, input_bytes=measured.input_bytes
    )
    simulated = penstock.simulate(lower(schedule, keep=keep), costs)
    assert all(measured.measured_bytes)
    assert measured.measured_bytes == simulated.peak_bytes
    assert measured.peak_saved == simulated.peak_saved


def test_offload_holds_what_arrived_and_at_most_two_micro_batches():
    stages = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    batch = torch.randn(16, 32)
    one = batch[:2].numel() * batch.element_size()
    with penstock.Pipeline(
        stages, example=batch, loss=lambda o: (o * o).sum(), schedule="gpipe", micro_batches=8, keep="offload"
    ) as pipe:
        pipe.step(batch)
        with pipe.record(memory=True) as measured:
            pipe.step(batch)
    assert measured.measured_bytes[0] <= 2 * one
    assert measured.measured_bytes[1] <= 8 * one + 2 * one
