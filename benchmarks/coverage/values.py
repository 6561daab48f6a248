"""Patterns that are hard to capture: in-place changes, views, regions, dropout, custom autograd functions."""

from __future__ import annotations

from typing import Any

import torch
from patterns import WIDTH, Built, Layers, rows, sequence
from registry import BATCH, model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

# values


@model("pattern")
def in_place_values() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x.add_(1).mul_(0.7)
                x[:, 0] = 0.5
                x[:, 1:3] += x[:, 3:5].detach()
                x = x.sin()
                x.neg_().relu_()
            return x

    return Model(), rows()


@model("pattern")
def view_changed_later() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            base = self.layers[0](x)
            left, right = base[:, : WIDTH // 2], base[:, WIDTH // 2 :]
            y = self.layers[1](base.clone())
            left.mul_(2)  # also changes base
            right += y[:, : WIDTH // 2]
            return self.layers[3](torch.tanh(self.layers[2](base)) + base)

    return Model(), rows()


@model("pattern")
def input_changed() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            half = x[:, ::2]
            y = super().forward(x + 1)
            half.zero_()
            return y + self.layers[0](x)

    return Model(), rows()


@model("pattern")
def filled_slices() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            out = x.new_zeros(x.shape[0], len(self.layers), WIDTH)
            for number, layer in enumerate(self.layers):
                x = torch.tanh(layer(x))
                out[:, number] = x
            return out

    return Model(), rows()


@model("pattern")
def expanded_and_strided() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            a = self.layers[0](x).mT  # not contiguous
            b = self.layers[1](x.mean(1)).unsqueeze(1).expand(-1, 6, -1)  # stride 0
            c = self.layers[2](a.mT + b)
            return self.layers[3](c.flip(1)[:, ::2]) + b[:, :3]

    return Model(), sequence()


@model("pattern")
def nested_tuples() -> Built:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, state: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Any]]:
            x, more = state
            return torch.tanh(self.fc(x)), {"past": [*more["past"], x], "sum": (more["sum"][0] + x.mean(),)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(*(Part() for _ in range(4)))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, more = self.parts((x, {"past": [], "sum": (0.0,)}))
            return y + sum(more["past"]), more["sum"][0]

    return Model(), rows()


@model("pattern")
def complex_numbers() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(4, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            waves = torch.fft.rfft(x, dim=1)
            waves = waves * torch.complex(self.filter, self.filter.flip(0))
            return super().forward(torch.fft.irfft(waves, n=x.shape[1], dim=1))

    return Model(), sequence()


@model("pattern")
def einsum() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            weight = torch.stack([layer.weight for layer in self.layers])
            heads = torch.einsum("bnd,hed->bhne", x, weight)
            scores = torch.einsum("bhne,bhme->bhnm", heads, heads).softmax(-1)
            return torch.einsum("bhnm,bhme->bne", scores, heads)

    return Model(), sequence()


@model("pattern")
def embedding_bag() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(50, WIDTH, mode="mean", padding_idx=0)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(self.bag(ids))

    return Model(), torch.randint(50, (BATCH, 7))


# regions and randomness


@model("pattern")
def functional_dropout() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = F.dropout(torch.relu(layer(x)), 0.3, training=self.training)
            return F.dropout(x, 0.1)  # always on: someone forgot training=

    return Model(), rows()


@model("pattern", is_single=True)
def autocast_region() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.layers[1](self.layers[0](x))
                with torch.autocast("cpu", enabled=False):
                    x = self.layers[2](x.float())
            return self.layers[3](x)

    return Model(), rows()


@model("pattern")
def no_grad_region() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.layers[0](x)
            y = super().forward(x)
            return (y - target).pow(2) + y.detach() * y

    return Model(), rows()


@model("pattern")
def checkpointing() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(lambda y, layer=layer: F.dropout(torch.tanh(layer(y)), 0.1), x, use_reentrant=False)
            return x

    return Model(), rows()


class Round(torch.autograd.Function):
    """Round in the forward; pass the gradient through unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401, ARG004
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401, ARG004
        return grad


class ScaleGrad(torch.autograd.Function):
    """Identity in the forward; return a third of the gradient, through a saved tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:  # noqa: ANN401
        ctx.scale = scale
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (x,) = ctx.saved_tensors
        return grad * ctx.scale + 0 * x, None


@model("pattern")
def straight_through() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = ScaleGrad.apply(Round.apply(layer(x) * 4) / 4, 1 / 3)
            return x

    return Model(), rows()


@model("pattern")
def vmap() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.func.vmap(lambda row: torch.outer(row, row).softmax(-1).sum(0))(y)

    return Model(), rows()


@model("pattern")
def inner_grad() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            energy = super().forward(x).pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)  # forces of a potential
            return force

    return Model(), rows()


@model("pattern")
def functional_call() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            moved = {name: p * 1.1 for name, p in self.layers[1].named_parameters()}
            return super().forward(torch.func.functional_call(self.layers[1], moved, (x,)))

    return Model(), rows()
