"""State that a forward changes between module calls, captured by replay: only steps may change it."""

import copy

import pytest
import torch

from penstock import Pipeline
from transparency import WIDTH, Layers, rows


class Counts(Layers):
    """The profile ran the model's own forward on the model's own buffers, and counted with it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("ema", torch.ones(WIDTH, dtype=torch.float64))
        self.total = torch.zeros(WIDTH, dtype=torch.float64)

    def add(self):
        self.count += 1

    def forward(self, x):
        self.add()
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        self.ema.mul_(0.9).add_(x.detach().mean(0))
        self.total.add_(1)
        return self.layers[3](torch.tanh(self.layers[2](x))) + self.ema


class Reassigns(Counts):
    """The buffer is another tensor after a forward: the profile put back the values of the old one."""

    def add(self):
        self.count = self.count + 1


class ThroughData(Counts):
    """A change through .data leaves no version behind."""

    def add(self):
        self.count.data.add_(1)


def state_of(model):
    return {"total": model.total.clone(), **{name: buffer.clone() for name, buffer in model.named_buffers()}}


@pytest.mark.parametrize("cuts", [(), ("layers.2",)], ids=["chosen cuts", "given cuts"])
@pytest.mark.parametrize("kind", [Counts, Reassigns, ThroughData])
def test_only_steps_change_buffers(kind, cuts):
    model, batch = kind(), rows()
    plain, before = copy.deepcopy(model), state_of(model)
    with Pipeline(
        model, example=batch, loss=torch.nn.functional.mse_loss, lanes=2, micro_batches=2, cuts=cuts,
        capture_path="replay", check=False,  # the running mean couples samples, as batch norm does
    ) as pipe:  # fmt: skip
        assert_same(state_of(model), before)
        pipe.step(batch, batch)
        for part in batch.chunk(2):
            plain(part)
        assert_same(state_of(model), state_of(plain))
        pipe.explain()  # with given cuts this makes the profile
        assert_same(state_of(model), state_of(plain))
        pipe.step(batch, batch)
    for part in batch.chunk(2):
        plain(part)
    assert_same(state_of(model), state_of(plain))


def test_a_list_that_forward_appends_to_stays_as_it_is():
    """The profile appended to the model's own list."""

    class Notes(Layers):
        def __init__(self):
            super().__init__()
            self.notes = ["mine"]

        def forward(self, x):
            self.notes.append("forward")
            return self.body(x)

    model = Notes()
    with Pipeline(model, example=rows(), lanes=2, micro_batches=2, capture_path="replay"):
        assert model.notes == ["mine"]


def assert_same(found, expected):
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-12, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
