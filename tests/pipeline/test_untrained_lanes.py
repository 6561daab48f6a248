"""Lanes that train nothing, under torchrun: an optimizer can be made there too, and nothing else changes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import penstock
import processes
from faults import launched
from penstock.checkpoint import Checkpoints
from penstock.pipeline.weights import is_placeholder
from pipelines import WIDTH, data

STEPS = 3
LANES = ["frozen first", "empty first", "empty last", "frozen last"]


def stages_of(kind):
    torch.manual_seed(0)
    trained, second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
    untrained = second.requires_grad_(False) if "frozen" in kind else nn.Tanh()
    return [untrained, trained] if "first" in kind else [trained, untrained]


def optimizer_of(parameters, is_filtered):
    return torch.optim.AdamW([p for p in parameters if p.requires_grad or not is_filtered], lr=0.1)


def plain(kind, is_filtered, clip=0.05):
    """Return the losses, norms and weights of the plain model."""
    model = nn.Sequential(*stages_of(kind))
    optimizer = optimizer_of(model.parameters(), is_filtered)
    x, target = data(8)
    figures = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        figures += [loss.item(), norm.item()]
    return figures, {name: p.flatten().tolist() for name, p in model.named_parameters()}


def trained(kind, is_filtered, folder, steps, restore):
    """Train some steps; save, or go on from what was saved."""
    x, target = data(8)
    pipe = penstock.Pipeline(
        stages_of(kind), example=x, loss=nn.functional.mse_loss, micro_batches=4, timeout=30, lanes=2
    )
    optimizer = optimizer_of(pipe.parameters(), is_filtered)
    figures = []
    with pipe, Checkpoints(folder, pipe, optimizer=optimizer) as checkpoints:
        if restore:
            checkpoints.restore()
        for step in steps:
            loss = pipe.step(x, target)
            figures += [float(loss), float(pipe.clip_grad_norm_(0.05))]
            optimizer.step()
            pipe.zero_grad()
            if not restore:
                checkpoints.save(step, wait=True)
        named = {name: p.flatten().tolist() for name, p in pipe.named_parameters()}
        extra = [p.numel() for p in pipe.parameters() if is_placeholder(p)]
        state = set(pipe.state_dict())
    return figures, named, extra, state


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_filtered", [False, True])
@pytest.mark.parametrize("kind", LANES)
def test_an_optimizer_of_a_lane_that_trains_nothing(kind, is_filtered, tmp_path):
    """torch said 'optimizer got an empty parameter list', and the other lanes lost that one."""
    figures, weights = plain(kind, is_filtered)
    found = processes.run(trained, 2, kind, is_filtered, tmp_path, range(1, STEPS + 1), False)
    for seen, named, _, state in found:
        assert seen == pytest.approx(figures, abs=1e-12)
        assert state == named.keys()
        for name, weight in named.items():
            assert weight == pytest.approx(weights[name], abs=1e-12)
    assert {name for _, named, _, _ in found for name in named} == weights.keys()
    assert [extra for _, _, extra, _ in found] == ([[0], []] if "first" in kind else [[], [0]])


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["frozen first", "empty last"])
def test_checkpoints_of_a_lane_that_trains_nothing(kind, tmp_path):
    """What stands in for parameters is not saved: threads and processes go on from each other's checkpoints."""
    wanted = plain(kind, is_filtered=True)[0][2 * (STEPS - 1) :]
    steps = range(1, STEPS)
    processes.run(trained, 2, kind, True, tmp_path / "processes", steps, False)
    trained(kind, True, tmp_path / "threads", steps, False)
    for folder in ("processes", "threads"):
        for seen, *_ in processes.run(trained, 2, kind, True, tmp_path / folder, [STEPS], True):
            assert seen == pytest.approx(wanted, abs=1e-12)
        assert trained(kind, True, tmp_path / folder, [STEPS], True)[0] == pytest.approx(wanted, abs=1e-12)


def scaled(kind):
    """Train with a scaler; the second of three steps overflows on the lane that trains."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x, target = data(8)
    stages = [stage.float() for stage in stages_of(kind)]
    pipe = penstock.Pipeline(
        stages, example=x.float(), loss=nn.functional.mse_loss, micro_batches=4, timeout=30, scaler=scaler
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scales, losses = [], []
    for step in range(3):
        loss = pipe.step(x.float(), target.float() * (1e38 if step == 1 else 1.0))
        losses.append(float(loss))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        optimizer.zero_grad()
    extra = [p.numel() for p in pipe.parameters() if is_placeholder(p)]
    pipe.close()
    return scales, losses, extra, dist.get_rank()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["frozen first", "empty first", "frozen last"])
def test_a_lane_that_trains_nothing_sees_that_another_overflowed(kind):
    """Its scaler had found no gradients, and raised; or it went on with another factor than the others."""
    for scales, losses, extra, rank in processes.run(scaled, 2, kind):
        assert scales == [256.0, 128.0, 128.0]
        assert losses[2] < losses[0]
        assert extra == ([1] if (rank == 0) == ("first" in kind) else [])


def test_within_the_step_a_stage_that_trains_nothing_has_an_optimizer_too():
    x, target = data(8)
    stages = stages_of("frozen first")
    before = copy.deepcopy(stages)
    with penstock.Pipeline(
        stages, example=x, loss=nn.functional.mse_loss, micro_batches=4, lanes=2, schedule="pipedream",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ) as pipe:  # fmt: skip
        pipe.step(x, target)
        found = dict(pipe.named_parameters())
    assert torch.equal(found["0.weight"], before[0].weight)
    assert not torch.equal(found["1.weight"], before[1].weight)


@pytest.mark.full
def test_the_command_trains_a_model_with_a_lane_that_trains_nothing(tmp_path):
    path = launched.config(tmp_path / "run.toml", model=f"{launched.JOBS}:half_frozen", clip=1.0, steps=3)
    code, told = launched.train(path, "--nproc", 2)
    assert code == 0, told
    code, told = launched.train(path, "--nproc", 2, "--steps", 6)
    assert code == 0, told
    assert sorted(launched.losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
