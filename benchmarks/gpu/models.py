"""The GPT of the GPU benchmarks, in plain torch, independent of all pipeline libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place.weight[: ids.shape[1]]


def gpt(depth: int = 24, width: int = 1024, length: int = 1024, vocabulary: int = 32768, heads: int = 16) -> nn.Module:
    """Return a GPT as a chain of blocks; the head is not tied to the embedding."""
    blocks = [Block(width, heads) for _ in range(depth)]
    return nn.Sequential(
        Embedding(vocabulary, length, width), *blocks, nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))
    )


def word_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def words(batch: int, length: int, vocabulary: int = 32768) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (batch, length + 1), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
