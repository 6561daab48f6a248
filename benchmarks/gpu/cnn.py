"""Time the whole training loop of the tutorials' small CNN, batch 128: with Penstock, and in plain PyTorch."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from clock import spread
from torch import nn

import penstock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_cnn import CNN

BATCH = 128
BAR = 2.0


@cache
def made_before() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))) for _ in range(16)]


class Batches:
    """Host batches made in advance, so that the loader costs no time."""

    def __init__(self, count: int) -> None:
        self._made, self._count = made_before(), count

    def __iter__(self) -> object:
        return (self._made[index % len(self._made)] for index in range(self._count))

    def __len__(self) -> int:
        return self._count


def plain(steps: int, *, reads_loss: bool) -> Callable[[], None]:
    """Return the training loop of the tutorials; it reads the running loss in every step, or never."""
    torch.manual_seed(0)
    model, loss_of = CNN().cuda(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def epoch() -> None:
        running = 0.0
        for images, labels in Batches(steps):
            loss = loss_of(model(images.cuda()), labels.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if reads_loss:
                running += loss.item()

    return epoch


def ours(steps: int, *, is_fed: bool = True, thread: bool | Literal["auto"] = "auto") -> Callable[[], None]:
    """Return the training loop with Penstock: host batches come through `feed`, or batches are on the GPU already."""
    torch.manual_seed(0)
    example, _ = next(iter(Batches(1)))
    pipe = penstock.Pipeline(
        CNN().cuda(), example=example.cuda(), loss=nn.CrossEntropyLoss(), lanes=1, micro_batches=1, devices=["cuda:0"]
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001, momentum=0.9)

    there = [(images.cuda(), labels.cuda()) for images, labels in Batches(16)]

    def epoch() -> None:
        running = torch.zeros((), device="cuda")
        batches = (
            penstock.feed(Batches(steps), pipe, thread=thread)
            if is_fed
            else (there[index % 16] for index in range(steps))
        )
        for images, labels in batches:
            running += pipe.step(images, labels)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def run(repeats: int = 10, steps: int = 200) -> dict[str, float]:
    """Time whole epochs by the wall clock, all contenders in turn; return milliseconds per step.

    The GPU is synchronised before and after each epoch.
    """
    found: dict[str, list[float]] = {}
    contenders = {
        "plain loop": plain(steps, reads_loss=True),
        "plain loop, loss not read": plain(steps, reads_loss=False),
        "ours": ours(steps),
        "ours, feed in a thread": ours(steps, thread=True),
        "ours, data on the GPU": ours(steps, is_fed=False),
    }
    for epoch in contenders.values():
        epoch()
    for _ in range(repeats):
        for name, epoch in contenders.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            epoch()
            torch.cuda.synchronize()
            found.setdefault(name, []).append(1e3 * (time.perf_counter() - begin) / steps)
    for name, times in found.items():
        print(f"  CNN, batch {BATCH}: {name:<26} {spread(times)} ms a step", flush=True)
    medians = {name: statistics.median(times) for name, times in found.items()}
    for name in ("ours", "ours, feed in a thread", "ours, data on the GPU"):
        print(f"  plain / {name}: {medians['plain loop'] / medians[name]:.2f} (bar {BAR})", flush=True)
    return medians
