"""Train a small GPT in a pipeline, in your own training loop.

    python examples/train_gpt.py                         # two lanes, one thread each
    torchrun --nproc-per-node 2 examples/train_gpt.py    # two lanes, one process each

Both print the same losses. `--html step.html` writes the timeline of the last step, measured and predicted.
"""

from __future__ import annotations

import argparse
import os
import time

import torch

import penstock
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt

BATCH_SIZE, LENGTH = 32, 32  # samples per step, and characters per sample
PROMPT = "The wheel does not care how much"  # as long as one sample


def main() -> None:
    """Train, print the progress, and let the model write text."""
    options = read_options()
    is_first = int(os.environ.get("RANK", "0")) == 0  # under torchrun, only one process prints
    torch.set_num_threads(1)  # one thread per lane; more do not help with matrices this small
    torch.manual_seed(options.seed)  # in every process, because all must start from the same weights
    random = torch.Generator().manual_seed(options.seed)

    text = load_text()
    model = make_gpt(len(text.characters), length=LENGTH)  # plain torch, independent of pipelines
    batch, target = text.batch(BATCH_SIZE, LENGTH, random)

    with penstock.Pipeline(
        model, example=batch, loss=loss_of, schedule=options.schedule, micro_batches=options.micro_batches
    ) as pipe:
        if is_first:
            print(pipe.explain(), flush=True)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=4e-3, betas=(0.9, 0.95))
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=options.steps + 1, pct_start=0.1)

        start = time.perf_counter()
        for step in range(1, options.steps + 1):
            loss = pipe.step(batch, target)  # forward and backward of all micro-batches
            pipe.clip_grad_norm_(1.0)  # the norm over all stages
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
            batch, target = text.batch(BATCH_SIZE, LENGTH, random)
            if is_first and (step in (1, options.steps) or step % 20 == 0):
                speed = step * BATCH_SIZE * LENGTH / (time.perf_counter() - start)
                print(f"step {step}: loss {loss.item():.6f}, {speed:,.0f} tokens/s", flush=True)

        with pipe.record() as timeline:
            pipe.step(batch, target)
        if is_first:
            print(timeline.to_text())
        if is_first and options.html:
            timeline.to_html(options.html, compare=pipe.explain().timeline)
            print(f"measured beside predicted: {options.html}")

        written = text.write_on(pipe.eval().forward, prompt=PROMPT, count=options.characters, generator=random)
        if is_first:
            print(f"\n{PROMPT}{written}")


def read_options() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule", default="1f1b", help="name of a schedule; penstock simulate --list shows all")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--characters", type=int, default=200, help="length of the text written at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--html", help="write the timeline of the last step to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
