"""Patterns that are hard to capture: control flow that depends on data, random Python, hooks, compiled parts, loops."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from patterns import WIDTH, Built, Layers, linears, rows, sequence
from registry import BATCH, model
from torch import Tensor, nn

# control flow


@model("pattern")
def if_on_a_tensor() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x)) if x.mean() > 0 else layer(-x)
            return x

    return Model(), rows()


@model("pattern")
def while_on_data() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            x, count = self.layers[0](x), 0
            while x.norm() > 1 and count < 6:
                x = self.layers[1](x) * 0.5
                count += 1
            return self.layers[3](torch.tanh(self.layers[2](x)))

    return Model(), rows()


@model("pattern")
def item_used_later() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            keep = int(x.abs().sum().item()) % 3 + 2
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x[:, :keep] * keep

    return Model(), rows()


@model("pattern")
def lengths_as_list() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            y = super().forward(x)
            return torch.stack([y[i, :n].mean(0) for i, n in enumerate(lengths.tolist())])

    return Model(), (sequence(), torch.randint(1, 6, (BATCH,)))


@model("pattern")
def data_dependent_shapes() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            flat = self.layers[0](x).flatten(0, 1)
            chosen = flat[flat[:, 0] > 0]
            chosen = self.layers[2](torch.tanh(self.layers[1](chosen)))
            index = (flat[:, 1] > 0).nonzero().squeeze(-1)
            out = flat.index_add(0, torch.arange(len(chosen)), chosen)
            return self.layers[3](out).index_select(0, index).sum(0, keepdim=True) + out.mean()

    return Model(), sequence()


@model("pattern")
def unique_values() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            kinds, back = ids.unique(return_inverse=True)
            return super().forward(self.embed(kinds))[back]

    return Model(), torch.randint(9, (BATCH, 5))


@model("pattern")
def layer_drop_torch() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training and torch.rand([]) < 0.4:
                    continue
                x = torch.tanh(layer(x))
            return x

    return Model(6), rows()


@model("pattern")
def layer_drop_python() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if self.training and random.random() < 0.4:
                    continue
                x = torch.tanh(layer(x))
            return x

    return Model(6), rows()


@model("pattern")
def shape_arithmetic() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            b, n, d = x.shape
            y = super().forward(x.reshape(b * n, d))
            y = y.view(b, n // 2, 2 * d) if n % 2 == 0 else y.view(b, n, d)
            return y / (b * n) + torch.arange(y.shape[1], dtype=x.dtype).view(1, -1, 1) * b

    return Model(), sequence()


@model("pattern")
def try_and_except() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            try:
                y = super().forward(x) @ torch.ones(3, 3, dtype=x.dtype)
            except RuntimeError:
                y = super().forward(x)
            return y

    return Model(), rows()


# loops over modules


@model("pattern")
def called_several_times() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.again, self.last = nn.Linear(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = self.first(x)
            for _ in range(5):
                state = self.again(x, state)
            return self.last(state)

    return Model(), rows()


@model("pattern")
def comprehension_over_modules() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            branches = [torch.tanh(layer(x)) for layer in self.layers]
            best = functools.reduce(torch.maximum, (layer(x) for layer in self.layers))
            return torch.stack(branches).sum(0) + best

    return Model(), rows()


@model("pattern")
def generator_of_blocks() -> Built:
    class Model(Layers):
        def states(self, x: Tensor) -> Any:  # noqa: ANN401
            for layer in self.layers:
                x = torch.tanh(layer(x))
                yield x

        def forward(self, x: Tensor) -> list[Tensor]:
            return list(self.states(x))

    return Model(), rows()


@model("pattern")
def modules_in_a_plain_list() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owned = linears()
            self.order = [self.owned[i] for i in (2, 0, 3, 1)]  # not registered a second time
            self.call = lambda x: functools.reduce(lambda y, layer: torch.tanh(layer(y)), self.order, x)

        def forward(self, x: Tensor) -> Tensor:
            return self.call(x)

    return Model(), rows()


@model("pattern")
def deep_recursion() -> Built:
    class Tree(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)
            self.left = Tree(depth - 1) if depth else None
            self.right = Tree(depth - 1) if depth else None

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.fc(x))
            return x if self.left is None else self.left(x) + self.right(x)

    return Tree(3), rows()


@model("pattern")
def method_other_than_forward() -> Built:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x))

        def decode(self, x: Tensor) -> Tensor:
            return self.down(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Part() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part.encode(x)
                x = part.decode(x)
            return x

    return Model(), rows()


# hooks and wrappers


@model("pattern")
def hook_that_changes() -> Built:
    built = Layers()
    for layer in built.layers:
        layer.register_forward_hook(lambda module, args, out: out * 0.5 + args[0])
    return built, rows()


@model("pattern")
def hook_that_records() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, Tensor] = {}
            for number, layer in enumerate(self.layers):
                layer.register_forward_hook(functools.partial(self.record, number))

        def record(self, number: int, module: nn.Module, args: Any, out: Tensor) -> None:  # noqa: ANN401, ARG002
            self.seen[number] = out

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, torch.stack([self.seen[i] for i in range(4)]).mean(0)

    return Model(), rows()


@model("pattern")
def pre_hook() -> Built:
    built = Layers()
    for layer in built.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(-1, keepdim=True),))
    built.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    return built, rows()


@model("pattern")
def tensor_hook() -> Built:
    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
                if x.requires_grad:
                    x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            return x

    return Model(), rows()


@model("pattern")
def backward_hook() -> Built:
    built = Layers()
    for layer in built.layers:
        layer.register_full_backward_hook(
            lambda module, inside, outside: tuple(g if g is None else g * 0.5 for g in inside)
        )
    return built, rows()


@model("pattern")
def parameter_hook() -> Built:
    built = Layers()
    for layer in built.layers:
        layer.weight.register_hook(lambda grad: grad * 2)
    return built, rows()


@model("pattern")
def compiled_part() -> Built:
    class Model(Layers):
        def __init__(self) -> None:
            super().__init__()
            for index in range(len(self.layers)):
                self.layers[index] = torch.compile(self.layers[index], backend="eager")

    return Model(), rows()


@model("pattern")
def compiled_whole() -> Built:
    return torch.compile(Layers(), backend="eager"), rows()


@model("pattern")
def scripted_part() -> Built:
    import warnings

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        act = torch.jit.trace(Act(), torch.randn(2, WIDTH))
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), act)]
    return nn.Sequential(*layers), rows()


@model("pattern")
def decorated_forward() -> Built:
    def logged(function: Any) -> Any:  # noqa: ANN401
        @functools.wraps(function)
        def inner(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            self.last_shapes = [tuple(a.shape) for a in args]
            return function(self, *args, **kwargs)

        return inner

    class Model(Layers):
        @logged
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Model(), rows()


@model("pattern")
def patched_forward() -> Built:
    built = Layers()
    for layer in built.layers:
        layer.forward = functools.partial(lambda old, x: old(x) + x, layer.forward)
    return built, rows()


@model("pattern")
def attention_with_mask() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True) for _ in range(4))

        def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
            for part in self.parts:
                y, weights = part(x, x, x, key_padding_mask=mask, average_attn_weights=False)
                x = x + y
            return x, weights

    mask = torch.zeros(BATCH, 6, dtype=torch.bool)
    mask[1:, 4:] = True
    return Model(), (sequence(), mask)


@model("pattern")
def packed_sequence() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.first(packed)[0], batch_first=True, total_length=x.shape[1])
            return self.last(out)

    return Model(), (sequence(), torch.randint(1, 7, (BATCH,)))
