"""Does a pipeline train to the same validation loss as a plain loop? Train the same GPT both ways, for several seeds.

    python examples/same_as_plain.py                            # two lanes, one thread each, and a plain loop
    torchrun --nproc-per-node 2 examples/same_as_plain.py       # two lanes, one process each

The plain loop uses one model, one device and nothing of Penstock. Both start from the same weights and see the same
batches. In float64, the remaining difference is rounding. `--dtype float32` trains in float32.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import torch

import penstock
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt

BATCH_SIZE, LENGTH, RATE = 32, 32, 4e-3


class Batches:
    """`count` batches of pieces of a text. They come from a new generator each time, so they are always the same."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.text = count, seed, load_text()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            yield self.text.batch(BATCH_SIZE, LENGTH, generator)


def make_model(seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return the GPT, with weights drawn from this seed."""
    torch.manual_seed(seed)
    return make_gpt(len(load_text().characters), length=LENGTH).to(dtype)


def train_plain(seed: int, steps: int, dtype: torch.dtype) -> float:
    """Train in a plain loop; return the validation loss."""
    model = make_model(seed, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for batch, target in Batches(steps, seed):
        loss_of(model(batch), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
    with torch.no_grad():
        losses = [loss_of(model(batch), target).item() for batch, target in validation_of(seed)]
    return sum(losses) / len(losses)


def train_in_lanes(seed: int, steps: int, dtype: torch.dtype, schedule: str, folder: str) -> float:
    """Train the same model in a pipeline of two lanes; return the validation loss."""
    batches = Batches(steps, seed)
    model = make_model(seed, dtype)
    with penstock.Pipeline(
        model, example=next(iter(batches))[0], loss=loss_of, lanes=2, micro_batches=8, schedule=schedule
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        trainer = penstock.Trainer(
            pipe,
            optimizer,
            batches,
            steps=steps,
            folder=folder,
            scheduler=rate,
            clip=1.0,
            validation=validation_of(seed),
        )
        loss = trainer.fit().validation
        assert loss is not None
        return loss


def validation_of(seed: int) -> Batches:
    """Return batches that the training does not use."""
    return Batches(4, seed + 1_000_000)


def main() -> None:
    """Train both ways for each seed; print the losses side by side."""
    options = read_options()
    is_first = int(os.environ.get("RANK", "0")) == 0  # under torchrun, only one process prints
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    if is_first:
        print(f"{options.steps} steps, {options.dtype}, {options.schedule} over 2 lanes\n")
        print("seed   plain loop   two lanes    two lanes - plain")
    for seed in range(options.seeds):
        folder = f"{options.folder}/seed-{seed}"
        found = train_in_lanes(seed, options.steps, dtype, options.schedule, folder)
        if is_first:
            wanted = train_plain(seed, options.steps, dtype)
            print(f"{seed:>4}   {wanted:<10.6f}   {found:<10.6f}   {found - wanted:+.1e}", flush=True)


def read_options() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--schedule", default="1f1b", help="name of a schedule; penstock simulate --list shows all")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64")
    parser.add_argument("--folder", default="same-as-plain", help="folder for the run folders, one per seed")
    return parser.parse_args()


if __name__ == "__main__":
    main()
