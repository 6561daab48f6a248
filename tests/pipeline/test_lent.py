"""The only lane replays its graphs on the stream that the caller works on, whichever that is."""

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.devices.streams import LentStream

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WIDTH = 16
LONG = 20_000_000  # clock ticks: some milliseconds


def data(step, batch=8):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]


@pytest.fixture
def lends(monkeypatch):
    """How often a stream was lent."""
    found, enter = [], LentStream.__enter__
    monkeypatch.setattr(LentStream, "__enter__", lambda self: (found.append(1), enter(self))[1])
    return found


def faults(steps, *, on_host=False, micro_batches=2):
    """Return what is wrong with gradients that add up over steps, each asked for on a stream behind long work.

    Args:
        steps: for each the stream, 0 to 2, the samples, and whether it is recorded.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))).double().cuda()
    reference, wanted, made = copy.deepcopy(model), [], []
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    batches = [data(at, batch) for at, (_, batch, _) in enumerate(steps)]
    there = [[tensor.cuda() for tensor in batch] for batch in batches]
    for x, target in there:
        loss = nn.functional.mse_loss(reference(x), target)
        loss.backward()
        wanted.append(loss.detach())
    torch.cuda.synchronize()
    with penstock.Pipeline(
        model, example=batches[0][0], loss=nn.functional.mse_loss, lanes=1, micro_batches=micro_batches,
        devices=["cuda:0"], graphs=True,
    ) as pipe:  # fmt: skip
        for at, (number, _, is_recorded) in enumerate(steps):
            with torch.cuda.stream(streams[number]):
                torch.cuda._sleep(LONG)
                x, target = batches[at] if on_host else [tensor.clone() for tensor in there[at]]
                if is_recorded:
                    with pipe.record():
                        made.append(pipe.step(x, target))
                else:
                    made.append(pipe.step(x, target))
                if not on_host:
                    x.zero_()  # behind the step, on the same stream
        torch.cuda.synchronize()
    found = [f"loss {at}" for at, (a, b) in enumerate(zip(made, wanted, strict=True)) if not torch.allclose(a, b)]
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    return found + [name for (name, p), other in pairs if not torch.allclose(p.grad, other.grad)]


@pytest.mark.parametrize("on_host", [False, True])
def test_callers_that_change_their_stream(on_host, lends):
    steps = [(0, 8, False), (0, 8, False), *((number, 8, False) for number in (0, 1, 2, 2, 1, 0, 0, 2))]
    assert not faults(steps, on_host=on_host)
    assert len(lends) == 9  # all but the first, which runs before there are graphs


@pytest.mark.parametrize("on_host", [False, True])
def test_steps_of_other_kinds_between(on_host, lends):
    """Recorded steps and those of a new shape run on the lane's own stream."""
    kinds = [(0, 8, False), (1, 8, False), (2, 8, False), (0, 8, True), (1, 8, False), (2, 6, False), (1, 8, False)]
    assert not faults([*kinds, (0, 6, False), (2, 8, True), (2, 8, False), (0, 6, False)], on_host=on_host)
    assert 0 < len(lends) < len(kinds) + 4


def test_a_stream_is_not_lent_to_several_lanes(lends):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).double().cuda()
    x, target = (tensor.cuda() for tensor in data(0))
    with penstock.Pipeline(
        model, example=x, loss=nn.functional.mse_loss, cuts=[1], micro_batches=2, devices=["cuda:0"] * 2, graphs=True
    ) as pipe:
        for _ in range(4):
            pipe.step(x, target)
    assert not lends
