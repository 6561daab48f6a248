"""Train the small CNN of many tutorials in a pipeline, on CIFAR-10 or on the digits of scikit-learn.

    python examples/train_cnn.py                                # digits, as images of 3 × 32 × 32 like CIFAR-10
    python examples/train_cnn.py --data cifar-10-batches-bin    # CIFAR-10, from its binary version
    torchrun --nproc-per-node 2 examples/train_cnn.py           # one process per lane instead of one thread

CIFAR-10 comes as "python version" and as "binary version" (https://www.cs.toronto.edu/~kriz/cifar.html). The python
version consists of pickles, and reading a pickle can run any code. So this script reads only the binary version.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import penstock

RECORD_BYTES = 1 + 3 * 32 * 32  # one label and the pixels


class CNN(nn.Module):
    """Two convolutions and two linear layers, as in the tutorials. Nothing here depends on stages."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 8 * 8, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each of ten classes."""
        x = self.pool(nn.functional.relu(self.conv1(x)))
        x = self.pool(nn.functional.relu(self.conv2(x)))
        x = x.view(-1, 32 * 8 * 8)
        x = nn.functional.relu(self.fc1(x))
        return self.fc2(x)


def main() -> None:
    """Train, and print the accuracy on the test images after each epoch."""
    options = read_options()
    is_first = int(os.environ.get("RANK", "0")) == 0  # under torchrun, only one process prints
    torch.manual_seed(0)  # in every process: the same weights and the same batches
    train, test = load_cifar(options.data) if options.data else load_digits()
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
    steps = len(loader) if options.steps is None else options.steps
    with penstock.Pipeline(
        CNN(), example=train[: options.batch_size][0], loss=nn.CrossEntropyLoss(), micro_batches=4
    ) as pipe:
        if is_first:
            print(pipe.explain())
            print(f"{len(train)} images to train with, {len(test)} to test with, {steps} steps an epoch", flush=True)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=options.lr, momentum=0.9)
        for epoch in range(1, options.epochs + 1):
            losses = []
            for _, (images, labels) in zip(range(steps), loader, strict=False):
                losses.append(pipe.step(images, labels))  # forward and backward of all micro-batches
                optimizer.step()
                optimizer.zero_grad()
            right = share_right(pipe, test)
            if is_first:
                mean = torch.stack(losses).mean().item()
                print(f"epoch {epoch}: loss {mean:.4f}, {right:.1%} of the test images right", flush=True)


def share_right(pipe: penstock.Pipeline, test: TensorDataset) -> float:
    """Return the share of test images whose class has the highest score."""
    pipe.eval()
    right = sum(int((pipe.forward(images).argmax(1) == labels).sum()) for images, labels in DataLoader(test, 250))
    pipe.train()
    return right / len(test)


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 handwritten digits of 8 × 8 pixels, in the format of CIFAR-10 images."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError:
        sys.exit(
            "Error: scikit-learn is not installed. Run `pip install scikit-learn`, or give CIFAR-10 with --data FOLDER"
        )
    digits = datasets.load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    images = nn.functional.interpolate(small, scale_factor=4).expand(-1, 3, -1, -1).contiguous()
    labels = torch.tensor(digits.target)
    return TensorDataset(images[:-297], labels[:-297]), TensorDataset(images[-297:], labels[-297:])


def load_cifar(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Return the images of CIFAR-10, from a folder with its binary version."""
    batches = sorted(folder.glob("data_batch_*.bin"))
    missing = [name for name in ("data_batch_1.bin", "test_batch.bin") if not (folder / name).is_file()]
    if missing:
        sys.exit(
            f"Error: {folder} has no {' and no '.join(missing)}. It must be CIFAR-10's binary version, unpacked from "
            "cifar-10-binary.tar.gz; the python version is made of pickles, which are not safe to read"
        )
    return read_records(batches), read_records([folder / "test_batch.bin"])


def read_records(paths: list[Path]) -> TensorDataset:
    """Return the images in these files, scaled to -1 … 1, and their classes."""
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents, strict=True):
        if not content or len(content) % RECORD_BYTES:
            sys.exit(
                f"Error: {path}: {len(content)} bytes, and a picture has {RECORD_BYTES}: this is no batch of CIFAR-10"
            )
    records = torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8).view(-1, RECORD_BYTES)
    labels = records[:, 0].long()
    if labels.max() > 9:
        sys.exit(f"Error: {', '.join(map(str, paths))}: a class of {labels.max()}, and CIFAR-10 has 0 to 9")
    return TensorDataset(records[:, 1:].reshape(-1, 3, 32, 32) / 127.5 - 1, labels)


def read_options() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with data_batch_*.bin and test_batch.bin of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps per epoch; by default one for each batch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.02)
    return parser.parse_args()


if __name__ == "__main__":
    main()
