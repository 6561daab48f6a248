"""Keep "fit": only what does not fit is recomputed, and nothing changes but memory and time."""

import pytest
import torch
from torch import nn

import penstock
import processes
from penstock.errors import PartitionError, UsageError
from pipelines import differences

WIDTH, BATCH = 32, 64


class Blocks(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.drop = nn.Dropout(dropout)
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)).sigmoid())
        return x


def loss(output):
    return (output * output).mean()


def plain(model, x):
    model.zero_grad(set_to_none=True)
    value = loss(model(x))
    value.backward()
    wanted = value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return wanted


def pipeline(model, x, **options):
    options = {"schedule": "1f1b", "lanes": 2, "micro_batches": 4, "analytic": "h100", "timeout": 60.0} | options
    return penstock.Pipeline(model, example=x, loss=loss, **options)


def some_limit(model, x, share, **options):
    """Return a limit between what recomputing everything takes and what holding everything does."""
    with pipeline(model, x, **options) as pipe:
        found = pipe.explain()
        state = min(found.profile.state_bytes(nodes) for nodes in found.graph.stages(pipe.cuts))
        return state + share * (max(found.partition.lane_bytes) - state)


@pytest.mark.parametrize(
    ("schedule", "share"), [("1f1b", 0.9), ("1f1b", 0.7), ("gpipe", 0.9), ("gpipe", 0.5), ("zb_h1", 0.9)]
)
def test_it_computes_the_same_and_holds_less(schedule, share):
    model, x = Blocks(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    wanted = plain(model, x)
    measured = {}
    for keep in ("hold", "fit"):
        with pipeline(model, x, schedule=schedule) as holding:
            cuts = holding.cuts
        options = (
            {"keep": keep, "memory_limit": some_limit(model, x, share, schedule=schedule)} if keep == "fit" else {}
        )
        with pipeline(model, x, schedule=schedule, cuts=cuts, **options) as pipe:
            value = pipe.step(x)
            assert not list(differences(pipe, value, wanted))
            with pipe.record(memory=True) as recording:
                pipe.step(x)
            measured[keep] = recording.measured_bytes
            if keep == "fit":
                assert any(pipe.plan.recomputed), "nothing was recomputed: the test says nothing"
        model.zero_grad(set_to_none=True)
    assert sum(measured["fit"]) < sum(measured["hold"])


def test_random_numbers_are_the_same_in_both_runs():
    """The gradient of dropout follows the mask of its forward; with another mask it would differ."""
    model, x = Blocks(dropout=0.5), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with pipeline(model, x, keep="fit", memory_limit=some_limit(model, x, 0.7)) as pipe:
        assert any(pipe.plan.recomputed)
        torch.manual_seed(3)
        first = pipe.step(x)
        gradients = [p.grad.clone() for p in pipe.parameters()]
        parameter = next(iter(pipe.parameters()))
        direction, size = torch.randn_like(parameter), 1e-5
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * size * direction
            torch.manual_seed(3)
            pipe.zero_grad()
            slopes.append(pipe.step(x))
            with torch.no_grad():
                parameter -= sign * size * direction
        slope = (slopes[0] - slopes[1]) / (2 * size)
        torch.testing.assert_close(slope, (gradients[0] * direction).sum(), rtol=1e-6, atol=1e-9)
        assert first.isfinite()


def test_it_needs_a_limit_and_says_when_nothing_helps():
    model, x = Blocks(), torch.randn(BATCH, WIDTH, dtype=torch.float64)
    with pytest.raises(UsageError, match="memory_limit"):
        pipeline(model, x, keep="fit")
    for limit in (1000, "1kB", ["1kB", 1000]):
        with pytest.raises(PartitionError):
            pipeline(model, x, keep="fit", memory_limit=limit)
    with pipeline(model, x, keep="fit", memory_limit="1GiB") as pipe:
        assert pipe.explain().memory_limit == (2.0**30, 2.0**30)


def in_process(limit):
    model, x = Blocks(), torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = plain(model, x)
    with pipeline(model, x, keep="fit", memory_limit=limit, lanes=None) as pipe:
        return list(differences(pipe, pipe.step(x), wanted)), [len(runs) for runs in pipe.plan.recomputed]


def test_processes_recompute_the_same_nodes():
    limit = some_limit(Blocks(), torch.randn(BATCH, WIDTH, dtype=torch.float64), 0.7)
    (faults, runs), others = processes.run(in_process, 2, limit)
    assert not faults
    assert not others[0]
    assert any(runs)
    assert runs == others[1]
