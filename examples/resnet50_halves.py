"""ResNet-50 in two halves, without rewriting it.

    python examples/resnet50_halves.py                  # cut where both halves take the same time
    python examples/resnet50_halves.py --cut layer3     # cut where tutorials cut by hand

The usual recipe is a subclass that moves `conv1` … `layer2` to one device and `layer3` … `fc` to another. It also needs
a new `forward`, in which one half works on one micro-batch while the other half works on the next. Here the model stays
unchanged: Penstock finds the cut and runs the forward and the backward of both halves. On a machine with two GPUs it
uses both. Otherwise it uses two lanes on the CPU, each with half of the cores.
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
    """Show how the model is cut. Then time a step in two halves and a step of the plain model."""
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
            """Train a step in micro-batches. As in a pipeline, batch norm sees one micro-batch at a time."""
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
    """Train `count` steps; return their losses and the median seconds of a step."""
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
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="width and height of an image in pixels; 224 is usual")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cut", help="cut before this module, for example layer3; by default Penstock chooses")
    parser.add_argument("--html", help="write the timeline of a step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
