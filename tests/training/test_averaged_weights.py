"""Running averages of the lanes' weights: those of torch's AveragedModel with the plain model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from penstock.errors import UsageError
from penstock.training import AveragedWeights
from pipelines import Knotty, data, sequence
from runtime_everywhere import everywhere, pipeline


def batches():
    return [data(8, seed=seed) for seed in range(4)]


def plain_averages(model, inputs_of, **options):
    """Train the plain model; return its averaged parameters and buffers by name."""
    averaged = AveragedModel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, target in batches():
        optimizer.zero_grad()
        F.mse_loss(model(*inputs_of(x)), target).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict()


@everywhere
def test_averages_are_those_of_torch():
    """With a tied parameter that two lanes hold, a frozen one and one that gets no gradient."""
    scale = torch.tensor(0.9, dtype=torch.float64)
    for options in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.7)}, {"avg_fn": get_ema_avg_fn(0.7)}):
        model = Knotty()
        wanted = plain_averages(copy.deepcopy(model), lambda x: (x, scale), **options)
        with pipeline(model, (data(8)[0], scale), loss=F.mse_loss) as pipe:
            average = AveragedWeights(pipe, **options)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for x, target in batches():
                pipe.zero_grad()
                pipe.step((x, scale), target)
                optimizer.step()
                average.update()
            assert average.num_updates == 4
            before = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
            with average.applied():
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter, wanted[name], check_stride=False, msg=name)
                pipe.evaluate((data(8)[0], scale), data(8)[1])
            assert all(torch.equal(before[name], parameter) for name, parameter in pipe.named_parameters())


@everywhere
def test_buffers_are_averaged_on_request():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6)).double()

    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}
    wanted = plain_averages(make(), lambda x: (x,), use_buffers=False, **options)
    with pipeline(make(), data(8)[0], loss=F.mse_loss, micro_batches=1) as pipe:
        average = AveragedWeights(pipe, use_buffers=True, **options)
        seen, optimizer = [], torch.optim.SGD(pipe.parameters(), lr=0.1)
        for x, target in batches():
            pipe.zero_grad()
            pipe.step(x, target)
            optimizer.step()
            average.update()
            seen.append({name: tensor.clone() for name, tensor in pipe.state_dict().items() if "running" in name})
        with average.applied():
            for name, tensor in pipe.state_dict().items():
                if "running" not in name:
                    torch.testing.assert_close(tensor, wanted[name], msg=name)
                    continue
                mean = seen[0][name]
                for values in seen[1:]:
                    mean = mean * 0.5 + values[name] * 0.5
                torch.testing.assert_close(tensor, mean, msg=name)


@everywhere
def test_a_state_continues():
    x, target = data(8)
    with pipeline(sequence(4), x, loss=F.mse_loss) as pipe:
        first = AveragedWeights(pipe, device="cpu")
        first.update()
        state = copy.deepcopy(first.state_dict())
        pipe.step(x, target)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.add_(1.0)
        second = AveragedWeights(pipe)
        second.load_state_dict(state)
        first.update()
        second.update()
        assert second.num_updates == 2
        ours, theirs = first.state_dict()["averages"], second.state_dict()["averages"]
        assert ours.keys() == {name for name, _ in pipe.named_parameters()}
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        with pytest.raises(UsageError, match="has no average of"):
            second.load_state_dict({"averages": {}, "num_updates": 1})


def test_mistakes_are_named():
    with pipeline(sequence(4), data(8)[0], loss=F.mse_loss) as pipe:
        with pytest.raises(UsageError, match="give only one"):
            AveragedWeights(pipe, avg_fn=get_ema_avg_fn(), multi_avg_fn=get_ema_multi_avg_fn())
        with pytest.raises(UsageError, match="there is no average yet"), AveragedWeights(pipe).applied():
            pass


@everywhere
def test_a_lane_without_trainable_parameters():
    model = sequence(4)
    for parameter in list(model.parameters())[:6]:
        parameter.requires_grad_(False)
    with pipeline(model, data(8)[0], loss=F.mse_loss) as pipe:
        average = AveragedWeights(pipe)
        average.update()
        average.update()
        with average.applied():
            assert average.state_dict()["averages"].keys() == {n for n, p in pipe.named_parameters() if p.requires_grad}
