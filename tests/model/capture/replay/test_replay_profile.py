"""Profiles of models captured by replay: models that a profiling run once failed on. Each tells its story in a line."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from penstock import Pipeline
from penstock.model.capture.capture import capture
from penstock.model.profiling.analytic import analytic
from penstock.model.profiling.measure import measure
from transparency import WIDTH, Layers, rows


class OneActivation(Layers):
    """One Tanh is called after each layer: the profile's repeated runs of a call counted as calls of the model."""

    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class Wrapped(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x) + self.act(2 * x)


class AloneAndInside(OneActivation):
    """A module is called on its own and inside another one: the calls inside count once, too."""

    def __init__(self):
        super().__init__()
        self.wrapped = Wrapped(self.act)

    def forward(self, x):
        for layer in self.layers:
            x = self.wrapped(self.act(layer(x)))
        return x


class OneLayer(Layers):
    """One layer is called many times, as ALBERT does."""

    def forward(self, x):
        for _ in range(3):
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
        return self.layers[3](self.layers[2](x))


def mean_square(output, target):
    return ((output - target) ** 2).mean()


def step_of_both(model, batch, **options):
    """Run a step in a pipeline and in a copy of the model, one micro-batch after the other; return both models."""
    plain, fixed = copy.deepcopy(model), {"loss": mean_square, "micro_batches": 2, "capture_path": "replay"}
    with Pipeline(model, example=batch[:2], **fixed, **options) as pipe:
        loss = pipe.step(batch, batch)
    parts = [mean_square(plain(part), part) / 2 for part in batch.chunk(2)]
    torch.autograd.backward(parts)
    torch.testing.assert_close(loss, sum(parts).detach(), rtol=1e-12, atol=0)
    return model, plain


def assert_same_gradients(model, plain):
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    assert any(gradient is not None for gradient in gradients.values())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", [OneActivation, AloneAndInside, OneLayer])
def test_module_that_is_called_twice_is_profiled(kind):
    assert_same_gradients(*step_of_both(kind(), rows(), lanes=2))


class DropsLayers(Layers):
    """LayerDrop: the profile fell on other layers than the capture had seen, and there was none."""

    def __init__(self, keep=0.5):
        super().__init__(6)
        self.keep, self.head = keep, nn.Linear(WIDTH, WIDTH, bias=False).double()

    def forward(self, x):
        for layer in self.layers:
            if not self.training or torch.rand(()).item() < self.keep:
                x = torch.tanh(layer(x))
        return self.head(x)


class LargeOnly(Layers):
    """A layer that only a large batch comes to: the profile, at the size of a micro-batch, never saw it."""

    def __init__(self, extra):
        super().__init__()
        self.extra = extra.double()

    def forward(self, x):
        y = self.layers[0](x)
        if x.abs().sum().item() > 20:
            y = self.extra(y)
        return self.body(y)


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_chance_drops_are_profiled(seed):
    torch.manual_seed(seed)
    captured = capture(DropsLayers(), rows(), path="replay")
    profile = measure(captured, repeats=1, seconds_budget=0.1)
    assert len(profile.forward) == len(captured.graph.nodes)
    assert (profile.forward > 0).all()


@pytest.mark.parametrize("extra", [nn.Linear(8, 8), nn.Tanh()], ids=["like others", "unlike others"])
def test_layer_on_a_branch_that_small_batches_do_not_take_is_profiled(extra):
    captured = capture(LargeOnly(extra), rows(), path="replay")
    assert captured.graph.nodes[1].name == "extra"
    for profile in (measure(captured, batch_size=1, repeats=1, seconds_budget=0.1), analytic(captured, batch_size=1)):
        assert (profile.forward > 0).all()


def test_layers_that_no_run_calls_cost_nothing_and_are_named():
    captured = capture(DropsLayers(keep=0.0), rows(), path="replay")
    with pytest.warns(UserWarning, match=r"count as zero: layers\.0, layers\.1"):
        profile = measure(captured, repeats=1, seconds_budget=0.1)
    names = [node.name for node in captured.graph.nodes]
    assert [names[i] for i in np.flatnonzero(profile.forward)] == ["head"]


def test_extra_runs_of_the_profile_draw_no_random_numbers():
    """The profile put back Python's random numbers and not numpy's."""

    class Numpy(DropsLayers):
        def forward(self, x):
            np.random.rand()
            return super().forward(x)

    captured = capture(Numpy(), rows(), path="replay")
    before = [np.random.get_state()[2], random.getstate(), torch.get_rng_state().tolist()]
    measure(captured, repeats=1, seconds_budget=0.1)
    assert [np.random.get_state()[2], random.getstate(), torch.get_rng_state().tolist()] == before


def test_pipeline_that_drops_layers_is_cut_and_runs():
    with Pipeline(
        DropsLayers(), example=rows(), loss=mean_square, lanes=2, micro_batches=2, capture_path="replay"
    ) as pipe:
        assert torch.isfinite(pipe.step(rows(), rows()))
