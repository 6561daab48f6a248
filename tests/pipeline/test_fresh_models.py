"""Models that stand where a wrong answer happens to fit, and models that change with each call."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations

import penstock
from penstock.errors import UsageError
from pipelines import differences

WIDTH = 6
OPTIONS = {"lanes": 2, "micro_batches": 4, "timeout": 60}


class Pairs(nn.Module):
    """A loss of its own for each pair of samples, with a scale of zero at the start, as audio-text models have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x, y):
        logits = self.left(x) @ self.right(y).T * self.scale + self.bias
        signs = 2 * torch.eye(len(x), dtype=logits.dtype) - 1
        return -F.logsigmoid(logits * signs).sum() / len(x)


def test_a_loss_of_pairs_with_a_scale_of_zero_is_refused():
    """While all logits are zero it is the sum of its parts to the last bit; gradients were off by more than theirs."""
    batch = {"x": torch.randn(8, WIDTH).double(), "y": torch.randn(8, WIDTH).double()}
    model = Pairs().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match="couples samples"):
        penstock.Pipeline(model, example=batch, **OPTIONS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_changes_with_each_call_is_named():
    """The message asked which dimension is the batch."""
    model = nn.Sequential(*(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4))).double()
    x = torch.randn(8, WIDTH).double()
    with pytest.raises(UsageError, match=r"how often it was called.*changes 0\.parametrizations.*micro_batches=1"):
        penstock.Pipeline(model, example=x, loss=nn.MSELoss(), **OPTIONS)


class Recorder(nn.Module):
    """Hooks that leave what layers return in a dict, which the end of forward reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.seen = {}
        for number, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda module, args, out, number=number: self.note(number, out))

    def note(self, number, out):
        self.seen[number] = out

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + sum(self.seen[number] for number in range(4))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1"])
def test_what_hooks_leave_belongs_to_a_micro_batch(schedule):
    """All stages had one dict, in which the next micro-batch replaced what a later stage had not read yet."""
    model, x, y = Recorder().double(), torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    plain = Recorder().double()  # of the same seed; a copy would share the hooks
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    with penstock.Pipeline(model, example=x, loss=F.mse_loss, schedule=schedule, **OPTIONS) as pipe:
        for _ in range(3):
            pipe.zero_grad()
            loss = pipe.step(x, y)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert not list(differences(pipe, loss, (wanted.detach(), gradients)))


class Listing(nn.Module):
    """Hooks behind or before layers that add to a list, which the forward empties at its beginning."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.values = []
        for layer in self.layers:
            getattr(layer, f"register_forward_{kind}")(self.note)

    def note(self, module, args, *out):
        self.values.append(out[0] if out else args[0])

    def forward(self, x):
        self.values.clear()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + sum(self.values)


@pytest.mark.parametrize("kind", ["hook", "pre_hook"])
def test_hooks_that_add_to_a_list_do_so_once(kind):
    """Hooks before layers were dropped in front of a stage, so that its list was short: loss 0.1 for 1.7."""
    model, x, y = Listing(kind).double(), torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    plain = Listing(kind).double()
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    with penstock.Pipeline(model, example=x, loss=F.mse_loss, **OPTIONS) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            loss = pipe.step(x, y)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert not list(differences(pipe, loss, (wanted.detach(), gradients)))


class Cached(nn.Module):
    """Makes a mask for each length once, and keeps it in a dict."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.masks = {}

    def mask(self, length):
        if length not in self.masks:
            self.masks[length] = torch.arange(length, dtype=torch.float64) / length + 0.5
        return self.masks[length]

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.mask(x.shape[1])
        return x


def test_a_cache_that_the_first_call_fills():
    """The second micro-batch found it full, and ended in a KeyError."""
    model, x, y = Cached().double(), torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    plain = copy.deepcopy(model)
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    with penstock.Pipeline(model, example=x, loss=F.mse_loss, capture_path="replay", **OPTIONS) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            loss = pipe.step(x, y)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert not list(differences(pipe, loss, (wanted.detach(), gradients)))


class Labelled(nn.Module):
    """Takes labels and does not use them; the loss has no target."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def forward(self, x, labels):
        return self.layers(x) + 0 * labels[:, None]


def test_a_loss_without_a_target_beside_an_input_called_labels():
    """It ended in a raw ValueError of zip."""
    batch = {"x": torch.randn(8, WIDTH).double(), "labels": torch.tensor([1, -100, 2, 3, -100, 1, 1, 0])}
    model = Labelled().double()
    wanted = copy.deepcopy(model)(**batch).square().mean()
    with penstock.Pipeline(model, example=batch, loss=lambda out: out.square().mean(), **OPTIONS) as pipe:
        for _ in range(3):
            torch.testing.assert_close(pipe.step(batch), wanted.detach(), rtol=1e-12, atol=0)


def test_parameters_of_eight_bits_are_left_alone():
    """Small parameters are changed a little for the comparison, which torch cannot do with all types."""

    class Scaled(Labelled):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, x, labels):
            return F.cross_entropy(super().forward(x, 0 * labels) * self.scale.to(x.dtype).mean(), labels)

    model = Scaled()
    model.layers.double()
    batch = {"x": torch.randn(8, WIDTH).double(), "labels": torch.tensor([1, -100, 2, 3, -100, 1, 1, 0])}
    wanted = copy.deepcopy(model)(**batch)
    with penstock.Pipeline(model, example=batch, **OPTIONS) as pipe:
        torch.testing.assert_close(pipe.step(batch), wanted.detach(), rtol=1e-12, atol=0)


def test_group_norm_of_channels_last_values():
    """torch crashes when it is asked for the gradient of the weights alone, and so did the profile."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(1, 8))]
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x.to(memory_format=torch.channels_last)).mean((2, 3))

    model, x, y = Model().double(), torch.randn(8, 8, 4, 4).double(), torch.randn(8, 8).double()
    plain = copy.deepcopy(model)
    wanted = F.mse_loss(plain(x), y)
    wanted.backward()
    with penstock.Pipeline(model, example=x, loss=F.mse_loss, schedule="zb_h1", **OPTIONS) as pipe:
        loss = pipe.step(x, y)
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        assert not list(differences(pipe, loss, (wanted.detach(), gradients)))
