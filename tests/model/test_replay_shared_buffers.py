"""One batch norm on two stages, captured by replay: no update of its buffers may be lost."""

import pytest
import torch
from torch import nn

from penstock import Pipeline
from transparency import WIDTH, Layers, rows

STEPS, MICRO_BATCHES = 3, 4


class OneNorm(Layers):
    """Both stages call it: one shape rehearsal lost an update, and two lanes raced for the others."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def forward(self, x):
        x = self.norm(self.layers[1](torch.tanh(self.layers[0](x))))
        return self.layers[3](self.norm(self.layers[2](x)))


def pipeline_of(model, keep="hold"):
    return Pipeline(
        model, example=rows(16), loss=nn.functional.mse_loss, lanes=2, micro_batches=MICRO_BATCHES,
        cuts=("layers.2",), keep=keep, capture_path="replay",
    )  # fmt: skip


@pytest.mark.parametrize("keep", ["hold", "recompute"])
def test_no_count_is_lost(keep):
    model = OneNorm()
    with pipeline_of(model, keep) as pipe:
        for _ in range(STEPS):
            pipe.step(rows(16), rows(16))
    assert model.norm.num_batches_tracked.item() == 2 * STEPS * MICRO_BATCHES


@pytest.mark.parametrize(("kind", "is_shared"), [(OneNorm, True), (Layers, False)])
def test_lanes_take_turns_where_both_change_a_buffer(kind, is_shared):
    with pipeline_of(kind()) as pipe:
        runs = [run for e in pipe._setup.executors(training=True, has_backward=True) for run in e.stages.values()]
        assert (runs[0]._lock is runs[1]._lock) == is_shared
