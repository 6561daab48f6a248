"""Architectures in plain torch: transformers, recurrent nets, mixtures of experts, graphs, recommenders."""

from __future__ import annotations

from typing import Any

import torch
from registry import BATCH, model
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Built = tuple[nn.Module, Any]
VOCAB, WIDTH, LENGTH = 101, 32, 12


def tokens(*, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (BATCH, length))


@model("plain")
def transformer() -> Built:
    """Return nn.Transformer, encoder and decoder, with masks and dropout."""

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
            self.core = nn.Transformer(WIDTH, 4, 3, 3, 64, batch_first=True)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
            out = self.core(self.source(source), self.target(target), tgt_mask=causal, src_key_padding_mask=source == 0)
            return self.head(out)

    return Translate(), (tokens(), tokens(length=9))


@model("plain")
def transformer_encoder() -> Built:
    """Return nn.TransformerEncoder with a class token and a learned position."""

    class Classify(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.position = nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH))
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, norm_first=True, batch_first=True)
            self.core = nn.TransformerEncoder(layer, 6, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, 10)

        def forward(self, ids: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(ids), -1, -1), self.embed(ids)], 1) + self.position
            return self.head(self.core(x)[:, 0])

    return Classify(), tokens()


class Block(nn.Module):
    """A causal transformer block."""

    def __init__(self, width: int = WIDTH, heads: int = 4, drop: float = 0.1) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(drop))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        drop = self.drop if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=drop)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


@model("plain")
def nano_gpt() -> Built:
    """Return a small GPT with tied embeddings and its own loss."""

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(8))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            if targets is None:
                return logits, None
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Gpt(), (tokens(), tokens())


@model("plain")
def lstm_language_model() -> Built:
    """Return stacked LSTMs with tied weights; the outputs include the state."""

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4))
            self.drop, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, VOCAB)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
            x, states = self.embed(ids), []
            for layer in self.layers:
                x, state = layer(x)
                x = self.drop(x)
                states.append(state)
            return self.head(x), states

    return Lstm(), tokens()


@model("plain")
def gru_seq2seq() -> Built:
    """Return a GRU encoder, and a decoder of GRU cells with attention, unrolled in Python."""

    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, WIDTH)
            self.encoder = nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
            self.bridge, self.cell = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.bridge(self.encoder(self.embed(source))[0])
            state, outs = memory.mean(1), []
            for step in self.embed(target).unbind(1):
                weights = torch.softmax((memory @ state.unsqueeze(-1)).squeeze(-1), -1)
                context = (weights.unsqueeze(-1) * memory).sum(1)
                state = self.cell(torch.cat([step, context], -1), state)
                outs.append(self.head(state))
            return torch.stack(outs, 1)

    return Seq2Seq(), (tokens(), tokens(length=5))


@model("plain")
def mlp() -> Built:
    """Return an nn.Sequential of linear layers."""
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(BATCH, WIDTH)


@model("plain")
def two_tower() -> Built:
    """Return two towers with a contrastive loss over the batch."""

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
            self.user_net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
            self.item_net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, *, users: Tensor, items: Tensor) -> dict[str, Tensor]:
            a = F.normalize(self.user_net(self.users(users).mean(1)), dim=-1)
            b = F.normalize(self.item_net(self.items(items).mean(1)), dim=-1)
            scores = self.scale.exp() * a @ b.T
            return {"loss": F.cross_entropy(scores, torch.arange(len(a))), "scores": scores}

    return Towers(), {"users": tokens(), "items": tokens(length=5)}


@model("plain")
def mixture_of_experts() -> Built:
    """Return a mixture of experts: top-2 routing with nonzero and index_add_, and a balance loss."""

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, 4, bias=False)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.reshape(-1, WIDTH)
            weights = self.gate(flat).softmax(-1)
            top, index = weights.topk(2, -1)
            out = torch.zeros_like(flat)
            for number, expert in enumerate(self.experts):
                row, slot = (index == number).nonzero(as_tuple=True)
                out.index_add_(0, row, expert(flat[row]) * top[row, slot, None])
            return x + out.view_as(x), (weights.mean(0) ** 2).sum() * 4

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Moe() for _ in range(4))
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            x, balance = self.embed(ids), []
            for layer in self.layers:
                x, extra = layer(x)
                balance.append(extra)
            return {"logits": self.head(x), "balance": torch.stack(balance).sum()}

    return Model(), tokens()


@model("plain")
def graph_net() -> Built:
    """Return message passing along edges that do not depend on the batch."""

    class Pass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            start, end = edges
            message = torch.relu(self.message(torch.cat([x[:, start], x[:, end]], -1)))
            total = torch.zeros_like(x).index_add(1, end, message)
            return self.update(total.flatten(0, 1), x.flatten(0, 1)).view_as(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(6, WIDTH)
            self.layers = nn.ModuleList(Pass() for _ in range(4))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            x = self.inside(x)
            for layer in self.layers:
                x = layer(x, edges)
            return self.head(x.mean(1))

    return Net(), (torch.randn(BATCH, 7, 6), torch.randint(7, (2, 20)))


@model("plain")
def vae() -> Built:
    """Return a variational auto-encoder, which draws noise in the middle."""

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, WIDTH), nn.ReLU())
            self.mean, self.log_var = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)
            self.decoder = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 64), nn.Sigmoid())

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            hidden = self.encoder(x)
            mean, log_var = self.mean(hidden), self.log_var(hidden)
            drawn = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if self.training else mean
            again = self.decoder(drawn)
            spread = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(-1).mean()
            return {"loss": F.mse_loss(again, x) + spread, "again": again, "mean": mean}

    return Vae(), torch.rand(BATCH, 64)


@model("plain")
def dlrm() -> Built:
    """Return a recommender: many embedding tables, their products, and a deep net."""

    class Dlrm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(6))
            self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(16 + 21, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
            x = self.bottom(dense)
            rows = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
            left, right = torch.tril_indices(7, 7, -1)
            products = torch.bmm(rows, rows.mT)[:, left, right]
            return torch.sigmoid(self.top(torch.cat([x, products], 1)))

    return Dlrm(), (torch.randn(BATCH, 13), torch.randint(50, (BATCH, 6, 3)))
