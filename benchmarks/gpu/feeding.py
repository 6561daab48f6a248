"""Time ResNet-50, batch 256: host data through `penstock.feed`, data that is on the GPU, and naive copies."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from clock import ratio, spread
from torch import Tensor, nn

import penstock

BATCH, SIZE, CLASSES = 256, 224, 1000
POOL = 4  # batches made in advance, so that the loader itself costs no time
BAR = 1.01
DTYPE = torch.bfloat16

Pair = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], object]


def resnet50() -> nn.Module:
    """Return the ResNet-50 of torchvision, or the equal one of the examples."""
    try:
        from torchvision.models import resnet50 as make
    except ImportError:
        sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
        from resnet import ResNet50

        return ResNet50()
    return make()


def pool(batch: int, size: int) -> list[Pair]:
    """Return batches in pageable memory, as a DataLoader without pin_memory returns them."""
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(batch, 3, size, size, generator=generator).to(memory_format=torch.channels_last),
            torch.randint(CLASSES, (batch,), generator=generator),
        )
        for _ in range(POOL)
    ]


def optimizer_of(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)


def step_milliseconds(step: Step, batches: Iterator[Pair], *, steps: int, warm: int) -> float:
    """Return the mean time of a step by the clock of the GPU, without pauses between steps."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number, (x, y) in enumerate(itertools.islice(batches, warm + steps)):
        if number == warm:
            begin.record()
        step(x, y)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / steps


class Ours:
    """The model in a pipeline with one lane; its steps run as CUDA graphs."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.pipe = penstock.Pipeline(
            model, example=example, loss=nn.CrossEntropyLoss(), lanes=1, micro_batches=1, devices=["cuda:0"],
            autocast=DTYPE,
        )  # fmt: skip
        self.optimizer = optimizer_of(self.pipe.parameters())

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.pipe.step(x, y)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Naive:
    """The loop of the tutorials: it copies from pageable memory and reads the loss in every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.loss_of = model, nn.CrossEntropyLoss()
        self.optimizer = optimizer_of(model.parameters())

    def step(self, x: Tensor, y: Tensor) -> float:
        x, y = x.to("cuda"), y.to("cuda")
        with torch.autocast("cuda", dtype=DTYPE):
            loss = self.loss_of(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def run(
    repeats: int = 10, *, steps: int = 15, warm: int = 5, batch: int = BATCH, size: int = SIZE
) -> dict[str, object]:
    """Time the three contenders in turn, so that a change of the GPU's clock rate affects all of them."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    host = pool(batch, size)
    there = [(x.cuda(), y.cuda()) for x, y in host]
    model = resnet50().to("cuda", memory_format=torch.channels_last)
    naive = Naive(copy.deepcopy(model))
    ours = Ours(model, there[0][0])
    feed = penstock.feed(itertools.cycle(host), ours.pipe)
    contenders: dict[str, tuple[Step, Callable[[], Iterator[Pair]]]] = {
        "on the GPU already": (ours.step, lambda: itertools.cycle(there)),
        "through feed": (ours.step, lambda: iter(feed)),
        "pageable, .item()": (naive.step, lambda: itertools.cycle(host)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first repeat warms up graphs, kernels and pinned memory
        for name, (step, batches_of) in contenders.items():
            batches = batches_of()
            took = step_milliseconds(step, batches, steps=steps, warm=warm)
            del batches  # deleting the iterator ends the iteration over the feed
            if repeat:
                times[name].append(took)
    for name, found in times.items():
        print(f"  ResNet-50, {batch} × {size}²: {name:<20} {spread(found):<26} ms a step", flush=True)
    share = ratio(times["through feed"], times["on the GPU already"])
    gain = ratio(times["pageable, .item()"], times["through feed"])
    print(f"  feed over data on the GPU: {share:.4f} (bar {BAR}); the naive way over feed: {gain:.2f}", flush=True)
    feed.close()
    ours.pipe.close()
    return {"times": times, "ratio": share, "bar": BAR, "is_met": share <= BAR}
