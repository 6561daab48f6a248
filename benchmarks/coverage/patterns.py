"""Habits that are hard to capture, each in a small model: outputs, inputs, state, values in place, regions, hooks."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from registry import BATCH, model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

Built = tuple[nn.Module, Any]
WIDTH = 16


def rows() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def sequence() -> Tensor:
    return torch.randn(BATCH, 6, WIDTH)


def linears(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Layers(nn.Module):
    """Four linear layers, for models that differ in how they use them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# what comes out


@model("pattern")
def dict_output() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = super().forward(x)
            return OrderedDict(y=y, parts=[x * 2, (y + 1, {"deep": y.sum()})], name="kept", count=3)

    return Model(), rows()


@dataclass
class Result:
    """A plain dataclass that nobody registered anywhere."""

    loss: Tensor
    logits: Tensor | None = None
    note: str = ""


@model("pattern")
def dataclass_output() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Result:
            y = super().forward(x)
            return Result(loss=y.pow(2).mean(), logits=y, note="fine")

    return Model(), rows()


class Pair(NamedTuple):
    """A named tuple with a hole."""

    first: Tensor
    second: Tensor | None


@model("pattern")
def namedtuple_output() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Pair:
            return Pair(super().forward(x), None)

    return Model(), rows()


@model("pattern")
def none_among_outputs() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor, extra: Tensor | None = None) -> tuple[Tensor, None, list[Tensor | None]]:
            return super().forward(x), extra, [None, x.mean()]

    return Model(), (rows(),)


@model("pattern")
def input_returned() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y = super().forward(x)
            return y, x, y  # the same tensor twice, and an input as it came

    return Model(), rows()


@model("pattern")
def parameter_returned() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), self.layers[2].weight

    return Model(), rows()


@model("pattern")
def zero_dim_values() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.abs().max()
            for layer in self.layers:
                x = layer(x) * scale.sqrt()
                scale = scale + x.mean()
            return scale

    return Model(), rows()


@model("pattern")
def early_return() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor, *, depth: int = 4) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = torch.relu(layer(x))
                if number + 1 == depth:
                    return x
            return x.sum(-1)

    return Model(5), {"x": rows(), "depth": 4}


@model("pattern")
def aux_losses_in_a_list() -> Built:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:
            y = torch.tanh(self.fc(x))
            losses.append(y.pow(2).mean())
            return x + y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            losses: list[Tensor] = []
            for part in self.parts:
                x = part(x, losses)
            return {"loss": x.mean() + 0.1 * sum(losses), "x": x}

    return Model(), rows()


# what goes in


@model("pattern")
def keyword_only_inputs() -> Built:
    class Model(Layers):
        def forward(self, *, x: Tensor, bias: Tensor) -> Tensor:
            return super().forward(x) + bias

    return Model(), {"x": rows(), "bias": rows()}


@model("pattern")
def scalar_inputs() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor, power: int, scale: float, flip: bool, mode: str = "mean") -> Tensor:
            y = super().forward(x if not flip else -x) ** power * scale
            return y.mean(-1) if mode == "mean" else y

    return Model(), (rows(), 2, 0.5, True)


@model("pattern")
def nested_inputs() -> Built:
    class Model(Layers):
        def forward(self, batch: dict[str, Any]) -> Tensor:
            a, (b, c) = batch["a"], batch["rest"]
            return super().forward(a + b) * c["scale"]

    return Model(), ({"a": rows(), "rest": (rows(), {"scale": torch.rand(BATCH, 1)})},)


@model("pattern")
def module_dict_dispatch() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"small": nn.Linear(WIDTH, 3), "large": nn.Linear(WIDTH, 30)})

        def forward(self, x: Tensor, task: str = "small") -> Tensor:
            return self.heads[task](super().forward(x))

    return Model(), {"x": rows(), "task": "large"}


@model("pattern")
def var_args() -> Built:
    class Model(Layers):
        def forward(self, *parts: Tensor, **more: Tensor) -> Tensor:
            return super().forward(sum(parts) + more["extra"])

    return Model(), {"extra": rows()}


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
            for layer in reversed(self.layers):  # an auto-encoder that decodes with the encoder's own weights
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
            left.mul_(2)  # changes base too
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
    """Round forward, pass straight through backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401, ARG004
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401, ARG004
        return grad


class ScaleGrad(torch.autograd.Function):
    """Identity forward, a third of the gradient backward, through a saved tensor."""

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
