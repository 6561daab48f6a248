"""Values and hooks that take a way that a module's arguments and results do not show, captured by replay."""

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import GraphError, LaneError
from transparency import WIDTH, rows


class Shared(nn.Module):
    """One layer with a hook, under two modules."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        layer.register_forward_hook(lambda module, args, output: output * 2)
        self.first, self.second = nn.Sequential(layer, nn.Tanh()), nn.Sequential(layer, nn.Tanh())
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        return self.head(self.second(self.first(x)))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, notes):
        made = torch.tanh(self.linear(x))
        notes.append(made * 2)
        return made


class Noted(nn.Module):
    """Each module leaves a value in a list, and the last one reads those of earlier stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Inner() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        notes = []
        for part in self.parts:
            x = part(x, notes)
        return self.head(x) + notes[0] * notes[2]


class Handed(Noted):
    """A value that every module gets, and none uses."""

    def forward(self, x):
        notes = [torch.tanh(x) * 2]
        for part in self.parts:
            x = part(x, list(notes))
        return self.head(x)


class Setter(Inner):
    def forward(self, x):
        self.note = torch.tanh(self.linear(x))
        return self.note * 2


class Attributes(nn.Module):
    """Each module leaves a value in an attribute, which the model reads at the end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Setter() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x) + self.parts[0].note * self.parts[2].note


class Leaf(nn.Module):
    """No module inside, and a value in a list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, notes):
        made = torch.tanh(x @ self.weight)
        notes.append(made * 2)
        return made


class Leaves(Noted):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Leaf() for _ in range(4)).double()


class Repeated(nn.Module):
    """A module that changes its buffer, called on two stages."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.part, self.between, self.head = CountRule(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        return self.head(self.part(torch.tanh(self.between(self.part(x)))))


class CountRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.count += 1
        return torch.tanh(self.linear(x)) * 2


@pytest.mark.parametrize("kind", [Shared, Noted, Handed, Repeated, Attributes, Leaves])
def test_every_cut_is_exact_or_refused(kind):
    """A hook was lost, a value in a list was another one or missing, and a module called twice was a KeyError."""
    batch = rows(6)
    torch.manual_seed(0)
    plain = kind()
    wanted = nn.functional.mse_loss(plain(batch), batch)
    wanted.backward()
    count = len(kind_nodes(kind, batch))
    for cut in range(1, count):
        torch.manual_seed(0)
        model = kind()
        options = {"lanes": 2, "micro_batches": 3, "cuts": [cut], "capture_path": "replay"}
        if kind is Repeated and cut <= 2:  # half of the counts were lost
            with pytest.raises(GraphError, match=f"no cut may lie at {cut}"):
                penstock.Pipeline(model, example=batch, loss=nn.functional.mse_loss, **options)
            continue
        with penstock.Pipeline(model, example=batch, loss=nn.functional.mse_loss, **options) as pipe:
            if kind is Leaves:
                with pytest.raises(LaneError, match="a value is used here that did not reach this stage"):
                    pipe.step(batch, batch)
                continue
            torch.testing.assert_close(pipe.step(batch, batch), wanted.detach(), msg=f"cut {cut}")
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def kind_nodes(kind, batch):
    from penstock.model.capture.capture import capture

    return capture(copy.deepcopy(kind()), batch, path="replay").graph.nodes
