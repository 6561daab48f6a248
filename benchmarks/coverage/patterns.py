"""Patterns that are hard to capture, each in a small model: kinds of inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from registry import BATCH, model
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
WIDTH = 16


def rows() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def sequence() -> Tensor:
    return torch.randn(BATCH, 6, WIDTH)


def linears(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))


class Layers(nn.Module):
    """Four linear layers; the models differ in how they use them."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = linears(count)

    def forward(self, x: Tensor) -> Any:  # noqa: ANN401
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# outputs


@model("pattern")
def dict_output() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> dict[str, Any]:
            y = super().forward(x)
            return OrderedDict(y=y, parts=[x * 2, (y + 1, {"deep": y.sum()})], name="kept", count=3)

    return Model(), rows()


@dataclass
class Result:
    """A plain dataclass that is not registered as a pytree."""

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
    """A named tuple in which one value may be None."""

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
            return y, x, y  # the same tensor twice, and an unchanged input

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


# inputs


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
