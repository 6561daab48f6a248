"""Train a GPT in two processes, measure eleven steps, and write the page of the step with the median time.

torchrun --standalone --nproc-per-node 2 scripts/measured_step.py PAGE
"""

from __future__ import annotations

import os
import sys

import torch

import penstock
from penstock.launch.build.small_gpt import load_text, loss_of, make_gpt

BATCH_SIZE, LENGTH, STEPS = 32, 64, 11


def main(path: str) -> None:
    """Train, record eleven steps, and write the page of the step with the median time."""
    torch.set_num_threads(1)  # one core per process
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    text = load_text()
    model = make_gpt(len(text.characters), length=LENGTH, width=256, depth=8)
    example, _ = text.batch(BATCH_SIZE, LENGTH, random)
    found = []
    with penstock.Pipeline(model, example=example, loss=loss_of, schedule="zb_h1", micro_batches=8) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
        for _ in range(3 + STEPS):
            with pipe.record() as timeline:
                pipe.step(*text.batch(BATCH_SIZE, LENGTH, random))
            optimizer.step()
            optimizer.zero_grad()
            found.append(timeline)
    if int(os.environ.get("RANK", "0")) == 0:
        middle = sorted(found[3:], key=lambda timeline: timeline.step_seconds)[STEPS // 2]
        middle.to_html(path)
        print(middle.to_text(width=100, color=False))


if __name__ == "__main__":
    main(sys.argv[1])
