"""Patterns that are hard to capture: buffers and other state, parameters that are shared, derived or frozen."""

from __future__ import annotations

import torch
from patterns import WIDTH, Built, Layers, rows, sequence
from registry import model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# state


@model("pattern")
def counter_in_place() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps += 1
                self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(x - self.mean)

    return Model(), rows()


@model("pattern")
def counter_reassigned() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps = self.steps + 1
            return super().forward(x) * self.steps

    return Model(), rows()


@model("pattern")
def python_counter() -> Built:
    class Model(Layers):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    return Model(), rows()


@model("pattern")
def batch_norm() -> Built:
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), rows()


@model("pattern")
def stored_activation() -> Built:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.cache = nn.Linear(WIDTH, WIDTH), None

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.tanh(self.fc(x))
            return self.cache * 2

    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.first = First()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x)) + self.first.cache

    return Model(), rows()


@model("pattern")
def lazily_created() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask") or self.mask.shape[0] != x.shape[1]:
                self.mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))
            return self.mask @ super().forward(x)

    return Model(), sequence()


@model("pattern")
def double_buffer() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.arange(WIDTH, dtype=torch.float64) / 7, persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.angles.cos().to(x.dtype)) + self.angles.sum().to(x.dtype)

    return Model(), rows()


# parameters


@model("pattern")
def shared_module() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList([shared, nn.Linear(WIDTH, WIDTH), shared, nn.Linear(WIDTH, WIDTH), shared])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    return Model(), rows()


@model("pattern")
def transposed_use() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            for layer in reversed(self.layers):  # an auto-encoder whose decoder uses the weights of the encoder
                y = torch.tanh(y @ layer.weight)
            return y

    return Model(), rows()


@model("pattern")
def weight_of_another_module() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.other.weight)
            return F.linear(super().forward(y), self.other.weight.t(), self.other.bias)

    return Model(), rows()


@model("pattern")
def only_parameters() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(6))
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.sin(x @ weight + self.bias)
            return x

    return Model(), rows()


@model("pattern")
def direct_parameters() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.pos_embed = nn.Parameter(torch.randn(1, 6, WIDTH))
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.pos_embed) * self.scale + self.pos_embed

    return Model(), sequence()


@model("pattern")
def frozen_parameters() -> Built:
    built = Layers(6)
    for layer in built.layers[:3]:
        layer.requires_grad_(False)
    return built, rows()


@model("pattern")
def unused_parameters() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.never = nn.Linear(WIDTH, WIDTH)

    return Model(), rows()


@model("pattern")
def weight_norm() -> Built:
    layers = [
        part for _ in range(4) for part in (nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.ELU())
    ]
    return nn.Sequential(*layers), rows()


@model("pattern")
def old_weight_norm() -> Built:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = [part for _ in range(4) for part in (nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.ELU())]
    return nn.Sequential(*layers), rows()


@model("pattern")
def spectral_norm() -> Built:
    layers = [
        part for _ in range(4) for part in (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.ELU())
    ]
    return nn.Sequential(*layers), rows()


@model("pattern")
def parametrization() -> Built:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    built = Layers()
    for layer in built.layers:
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return built, rows()
