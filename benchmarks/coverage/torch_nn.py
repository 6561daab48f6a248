"""The modules of torch.nn, unchanged, each in a model of a few layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from registry import BATCH, model
from torch import Tensor, nn

Built = tuple[nn.Module, Any]
WIDTH, LENGTH = 16, 10


def add(name: str, build: Callable[[], Built], *, batch_dim: int = 0) -> None:
    """Register a builder under a name."""
    build.__name__ = name
    model("torch.nn", batch_dim=batch_dim)(build)


def features(*shape: int, dim: int = 0) -> Tensor:
    sizes = [*shape]
    sizes.insert(dim, BATCH)
    return torch.randn(sizes)


class Around(nn.Module):
    """A layer between two linear layers. If it returns a tuple, the first value is used."""

    def __init__(self, layer: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(self.before(x))
        return self.after(out[0] if isinstance(out, tuple) else out)


class Attending(nn.Module):
    """Self-attention of a sequence."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.before, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 4, **options)
        self.after = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(x)
        out, weights = self.attention(x, x, x)
        return self.after(x + out), weights


class Cells(nn.Module):
    """A recurrent cell that is called once for every step of a sequence."""

    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.before, self.cell, self.after = nn.Linear(WIDTH, WIDTH), kind(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, made = None, []
        for step in self.before(x).unbind(1):
            state = self.cell(step, state)
            made.append(state[0] if isinstance(state, tuple) else state)
        return self.after(torch.stack(made, 1))


class Unpooled(nn.Module):
    """Pooling that keeps its indices, and unpooling with them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2, return_indices=True)
        self.unpool, self.last = nn.MaxUnpool2d(2), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        small, places = self.pool(self.first(x))
        return self.last(self.unpool(small.tanh(), places))


class Translating(nn.Module):
    """nn.Transformer with a source and a target."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.core, self.head = nn.Transformer(WIDTH, 4, 2, 2, 32, **options), nn.Linear(WIDTH, 5)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.core(source, target))


class Decoding(nn.Module):
    """nn.TransformerDecoder with a causal mask."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 32, **options)
        self.decoder, self.head = nn.TransformerDecoder(layer, 3, nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, 5)

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        length = target.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        return self.head(self.decoder(target, memory, tgt_mask=mask))


class Bags(nn.Module):
    """nn.EmbeddingBag with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.after = nn.EmbeddingBag(30, WIDTH, sparse=True), nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())

    def forward(self, words: Tensor) -> Tensor:
        return self.after(self.bag(words))


class Paired(nn.Module):
    """nn.Bilinear, and distances and similarities of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
        self.both, self.near, self.like = nn.Bilinear(8, 8, 5), nn.PairwiseDistance(), nn.CosineSimilarity()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b = self.first(a), self.second(b)
        return self.both(a, b), self.near(a, b), self.like(a, b)


class Folding(nn.Module):
    """nn.Unfold and nn.Fold around a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.unfold, self.mix, self.fold = nn.Unfold(4, stride=4), nn.Linear(48, 48), nn.Fold((16, 16), 4, stride=4)
        self.last = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.mix(self.unfold(x).transpose(1, 2)).transpose(1, 2)
        return self.last(self.fold(patches))


class Parametrized(nn.Module):
    """Weights that are computed from other parameters: weight norm, spectral norm, orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.c = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh()).tanh())


class Kept(nn.Module):
    """Layers and parameters in nn.ModuleDict, nn.ModuleList, nn.ParameterList and nn.ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "abc"})
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        self.shifts = nn.ParameterDict({name: torch.randn(WIDTH) for name in "abc"})
        self.ends = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        for scale, (name, layer) in zip(self.scales, self.layers.items(), strict=True):
            x = (layer(x) * scale + self.shifts[name]).tanh()
        return [end(x) for end in self.ends]


for kind in (nn.RNN, nn.LSTM, nn.GRU):
    word = kind.__name__.lower()
    add(f"{word}_batch_first", lambda k=kind: (Around(k(WIDTH, WIDTH, 2, batch_first=True)), features(LENGTH, WIDTH)))
    add(f"{word}_time_first", lambda k=kind: (Around(k(WIDTH, WIDTH, 2)), features(LENGTH, WIDTH, dim=1)), batch_dim=1)
    add(
        f"{word}_two_ways",
        lambda k=kind: (
            Around(k(WIDTH, 8, 2, batch_first=True, bidirectional=True, dropout=0.1)),
            features(LENGTH, WIDTH),
        ),
    )
add("lstm_projected", lambda: (Around(nn.LSTM(WIDTH, 24, proj_size=WIDTH, batch_first=True)), features(LENGTH, WIDTH)))
for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
    add(f"{kind.__name__.lower()}s", lambda k=kind: (Cells(k), features(LENGTH, WIDTH)))

add("attention_batch_first", lambda: (Attending(batch_first=True), features(LENGTH, WIDTH)))
add("attention_with_bias_kv", lambda: (Attending(batch_first=True, add_bias_kv=True), features(LENGTH, WIDTH)))
for first in (True, False):
    for before in (True, False):
        options = {"batch_first": first, "norm_first": before}
        end, dim = f"{'batch' if first else 'time'}_first_{'pre' if before else 'post'}_norm", 0 if first else 1
        add(
            f"encoder_{end}",
            lambda o=options, d=dim: (
                Around(
                    nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 32, **o), 3, enable_nested_tensor=False)
                ),
                features(LENGTH, WIDTH, dim=d),
            ),
            batch_dim=dim,
        )
        add(
            f"translating_{end}",
            lambda o=options, d=dim: (Translating(**o), (features(LENGTH, WIDTH, dim=d), features(7, WIDTH, dim=d))),
            batch_dim=dim,
        )
add("decoder_causal", lambda: (Decoding(batch_first=True), (features(LENGTH, WIDTH), features(7, WIDTH))))
add(
    "decoder_gelu",
    lambda: (Decoding(batch_first=True, activation="gelu"), (features(LENGTH, WIDTH), features(7, WIDTH))),
)

for dims, convolution, back, norm in (
    (1, nn.Conv1d, nn.ConvTranspose1d, nn.InstanceNorm1d),
    (2, nn.Conv2d, nn.ConvTranspose2d, nn.InstanceNorm2d),
    (3, nn.Conv3d, nn.ConvTranspose3d, nn.InstanceNorm3d),
):
    add(
        f"convolutions_{dims}d",
        lambda n=dims, c=convolution, b=back, m=norm: (
            nn.Sequential(
                c(3, 8, 3, padding="same"), m(8, affine=True), nn.ELU(), c(8, 8, 3, 2, groups=2), b(8, 4, 3, 2)
            ),
            features(3, *[9] * n),
        ),
    )
    pools = {
        n: getattr(nn, f"{n}{dims}d") for n in ("MaxPool", "AvgPool", "LPPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
    }
    add(
        f"pools_{dims}d",
        lambda n=dims, c=convolution, p=pools: (
            nn.Sequential(
                c(3, 8, 3), p["MaxPool"](2, 1), c(8, 8, 3), p["AvgPool"](2, 1), p["LPPool"](2, 2, 1), c(8, 4, 2),
                p["AdaptiveAvgPool"](3), c(4, 4, 1), p["AdaptiveMaxPool"](1), nn.Flatten(), nn.Linear(4, 3),
            ),
            features(3, *[12] * n),
        ),
    )  # fmt: skip
    paddings = [getattr(nn, f"{n}Pad{dims}d") for n in ("Reflection", "Replication", "Zero", "Circular")]
    add(
        f"paddings_{dims}d",
        lambda n=dims, c=convolution, p=paddings: (
            nn.Sequential(*(layer for pad in p for layer in (pad(1), c(3, 3, 3)))),
            features(3, *[6] * n),
        ),
    )

add("unpooled", lambda: (Unpooled(), features(3, 8, 8)))
add("folding", lambda: (Folding(), features(3, 16, 16)))
add("sparse_bags", lambda: (Bags(), torch.randint(30, (BATCH, 6))))
add("paired", lambda: (Paired(), (features(WIDTH), features(WIDTH))))
add("parametrized", lambda: (Parametrized(), features(WIDTH)))
add("kept_in_containers", lambda: (Kept(), features(WIDTH)))
add(
    "shuffles",
    lambda: (
        nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.PixelShuffle(2), nn.Conv2d(4, 8, 3), nn.ChannelShuffle(2),
            nn.Upsample(scale_factor=2), nn.Conv2d(8, 2, 1), nn.PixelUnshuffle(2), nn.Conv2d(8, 4, 1), nn.Softmax2d(),
        ),
        features(3, 10, 10),
    ),
)  # fmt: skip
add(
    "norms",
    lambda: (
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3), nn.LocalResponseNorm(2), nn.Conv2d(8, 8, 3),
            nn.LayerNorm([8, 4, 4]), nn.Conv2d(8, 8, 3), nn.RMSNorm([8, 2, 2]), nn.Flatten(), nn.Linear(32, 3),
        ),
        features(3, 10, 10),
    ),
)  # fmt: skip
add(
    "batch_norms",
    lambda: (
        nn.Sequential(
            nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None),
            nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3),
        ),
        features(WIDTH),
    ),
)  # fmt: skip
ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign,
    nn.Tanh, nn.Tanhshrink,
)  # fmt: skip
add(
    "activations",
    lambda: (
        nn.Sequential(*(layer for kind in ACTIVATIONS for layer in (nn.Linear(WIDTH, WIDTH), kind()))),
        features(WIDTH),
    ),
)
add(
    "soft_activations",
    lambda: (
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH), nn.LogSoftmax(-1),
            nn.Linear(WIDTH, WIDTH), nn.Softmin(-1), nn.Linear(WIDTH, WIDTH), nn.GLU(-1),
            nn.Threshold(0.1, 0.2), nn.Linear(8, 3),
        ),
        features(WIDTH),
    ),
)  # fmt: skip
