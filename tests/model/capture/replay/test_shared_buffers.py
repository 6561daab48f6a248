"""One batch norm on two stages, captured by replay: no update of its buffers may be lost."""

import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.errors import GraphError
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
        runs = [run for e in pipe.internals.executors() for run in e.stages.values()]
        assert (runs[0]._lock is runs[1]._lock) == is_shared


class Counts(Layers):
    """Code between the calls of modules changes a buffer in two places."""

    def __init__(self, how):
        super().__init__(6)
        self.how = how
        self.register_buffer("total", torch.zeros(WIDTH, dtype=torch.float64))

    def add(self, x):
        if self.how == "in place":
            self.total += x.detach().sum(0)
        elif self.how == "method":
            self.total.add_(x.detach().sum(0))
        else:
            self.total = self.total + x.detach().sum(0)

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number in (1, 3):
                self.add(x)
        return x


@pytest.mark.parametrize("path", ["replay", "export", "auto"])
@pytest.mark.parametrize("how", ["in place", "method", "assigned"])
def test_a_buffer_that_code_changes_in_two_places_lives_on_one_stage(how, path):
    """Two stages each changed a copy: half of the updates were lost, or more, by a race."""
    model, plain = Counts(how), Counts(how)
    with Pipeline(
        model, example=rows(16), loss=nn.functional.mse_loss, lanes=2, micro_batches=MICRO_BATCHES, capture_path=path
    ) as pipe:
        for _ in range(STEPS):
            pipe.step(rows(16), rows(16))
            plain(rows(16))
        torch.testing.assert_close(pipe.state_dict()["total"], plain.total)


@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_such_a_buffer_is_not_cut_apart(how):
    with pytest.raises(GraphError, match="no cut may lie at 3"):
        Pipeline(Counts(how), example=rows(16), loss=nn.functional.mse_loss, lanes=2, cuts=[3], capture_path="replay")
