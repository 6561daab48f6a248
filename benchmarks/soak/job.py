"""The training of the soak: a small model in float64, and batches that arrive slowly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

WIDTH, SAMPLES = 32, 512


def model() -> nn.Module:
    """Return a chain of blocks with dropout, so that a resume must restore the random numbers too."""
    blocks = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Input and target pairs; each depends only on its index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = torch.tanh(self.x.roll(1, dims=1) * 2)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Slow:
    """Batches with a pause before each, so that a fault hits a run of few steps instead of thousands."""

    def __init__(self, seconds: float) -> None:
        self.loader, self.seconds = DataLoader(Samples(), batch_size=32, shuffle=True), seconds
        self.sampler, self.batch_sampler = self.loader.sampler, self.loader.batch_sampler

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for item in self.loader:
            time.sleep(self.seconds)
            yield tuple(item)


def data() -> Slow:
    """Return shuffled batches; SOAK_PAUSE is the pause before each, in seconds."""
    return Slow(float(os.environ.get("SOAK_PAUSE", "0")))
