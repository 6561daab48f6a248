"""ResNet-50 in two halves, without rewriting it.

    python examples/resnet50_halves.py                  # cut where both halves take the same time
    python examples/resnet50_halves.py --cut layer3     # cut where the tutorials cut by hand

The usual recipe makes a subclass that moves `conv1` … `layer2` to one device and `layer3` … `fc` to another, and writes
`forward` anew so that one half works on a micro-batch while the other works on the next. Here the model stays as it is:
Penstock finds the cut, runs the halves, and the backward too. On a machine with two GPUs it uses both; else two lanes
of the CPU, with half of its cores each.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

import penstock
from resnet import ResNet50


def main() -> None:
    """Say how the model is cut, then time a step in two halves beside one of the plain model."""
    options = read_options()
    torch.manual_seed(0)
    model, loss_of = ResNet50(), nn.CrossEntropyLoss()
    plain = copy.deepcopy(model)
    images = torch.randn(options.batch_size, 3, options.size, options.size)
    labels = torch.randint(1000, (options.batch_size,))
    with penstock.Pipeline(
        model,
        example=images,
        loss=loss_of,
        lanes=2,
        micro_batches=options.micro_batches,
        schedule=options.schedule,
        cuts=[options.cut] if options.cut else (),
    ) as pipe:
        print(pipe.explain(), flush=True)
        device = pipe.devices[0]
        plain.to(device)
        pieces = list(zip(images.chunk(options.micro_batches), labels.chunk(options.micro_batches), strict=True))

        def step_plain() -> Tensor:
            """Train a step in micro-batches: batch norm sees each by itself, in a pipeline as here."""
            total = torch.zeros(())
            for x, y in pieces:
                loss = loss_of(plain(x.to(device)), y.to(device)) * (len(x) / len(images))
                loss.backward()
                total += loss.detach().cpu()
            return total

        def step_halves() -> Tensor:
            return pipe.step(images, labels)

        took = {
            "plain": train(step_plain, plain.parameters(), options.steps),
            "in two halves": train(step_halves, pipe.parameters(), options.steps),
        }
        for name, (losses, seconds) in took.items():
            print(f"{name}: {seconds:.3f} s a step, loss {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}")
        with pipe.record() as timeline:
            pipe.step(images, labels)
        print(timeline.to_text())
        if options.html:
            timeline.to_html(options.html, compare=pipe.explain().timeline)
            print(f"measured beside predicted: {options.html}")


def train(step: Callable[[], Tensor], parameters: Iterable[nn.Parameter], count: int) -> tuple[list[float], float]:
    """Train some steps; return their losses, and the seconds of the middle one."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    optimizer.zero_grad()
    losses, seconds = [], []
    for _ in range(count):
        start = time.perf_counter()
        losses.append(step().item())
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds)


def read_options() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="pixels of an image's side; 224 is usual")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cut", help="the module before which to cut, as layer3; by default Penstock chooses")
    parser.add_argument("--html", help="where to put the timeline of a step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
