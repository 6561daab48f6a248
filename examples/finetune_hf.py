"""Fine-tune a causal language model of transformers on prompts and answers, over two lanes.

    python examples/finetune_hf.py                            # two lanes, one thread each
    torchrun --nproc-per-node 2 examples/finetune_hf.py       # two lanes, one process each

The task is to add numbers: the prompt is `27+5=`, the answer is `32.`. Rows have different lengths, and each batch is
as long as its longest row. The labels of prompts and padding are -100, so the loss is a mean over the answers of all
batches of an update. The losses are those of `transformers.Trainer` with the same batches.

`--model FOLDER` starts from any causal model that `save_pretrained` has written; each lane reads its own weights.
Without it, the script writes a small one with random weights. A second call with the same `--folder` continues from the
last checkpoint. At the end, the model is in `FOLDER/model`, for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import penstock

WORDS = "_0123456789+=."  # the first one is padding
IGNORED = -100
BATCH_SIZE, RATE, CLIP = 8, 3e-3, 1.0

Batch = dict[str, torch.Tensor]
Row = tuple[list[int], list[int]]


def make_rows(count: int, seed: int) -> list[Row]:
    """Return prompts and answers as numbers of words."""
    source = random.Random(seed)  # noqa: S311 - no secret
    pairs = [(source.randrange(10 ** source.randint(1, 3)), source.randrange(100)) for _ in range(count)]
    texts = [(f"{one}+{other}=", f"{one + other}.") for one, other in pairs]
    return [([WORDS.index(c) for c in prompt], [WORDS.index(c) for c in answer]) for prompt, answer in texts]


def collate(rows: list[Row]) -> Batch:
    """Pad rows to the longest one; only answers have labels."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    words = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(words), torch.full_like(words, IGNORED)
    for at, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        words[at, :end] = torch.tensor(prompt + answer)
        mask[at, :end] = 1
        labels[at, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def make_loader(rows: list[Row], seed: int) -> DataLoader[Batch]:
    """Return a loader that shuffles the rows by a seed; under torchrun, all processes draw the same order."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(rows, BATCH_SIZE, shuffle=True, collate_fn=collate, generator=generator)  # type: ignore[arg-type]


def count_labels(batch: Batch) -> int:
    """Return the number of words that the loss of a batch averages over. A causal model skips the first one."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def write_small_model(folder: Path) -> None:
    """Write a small model with random weights, in place of one from a hub."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **size)).save_pretrained(folder)


def empty_model(folder: Path) -> PreTrainedModel:
    """Return the model in a folder without its weights: each lane reads its own."""
    config = AutoConfig.from_pretrained(folder)
    config.use_cache = False
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def updates(batches: Iterable[Batch], accumulate: int) -> Iterator[list[Batch]]:
    """Yield the batches of each update, epoch after epoch; the last update of an epoch may have fewer."""
    while True:
        group = []
        for batch in batches:
            group.append(batch)
            if len(group) == accumulate:
                yield group
                group = []
        if group:
            yield group


def run_update(pipe: penstock.Pipeline, group: list[Batch]) -> float:
    """Run forward and backward of all batches of an update; return the mean loss over all of their labels."""
    counts = [count_labels(batch) for batch in group]
    shares = [count / sum(counts) for count in counts]
    losses = [pipe.step(batch, scale=share) for batch, share in zip(group, shares, strict=True)]
    return sum(float(loss) * share for loss, share in zip(losses, shares, strict=True))


def evaluate(pipe: penstock.Pipeline, rows: list[Row]) -> tuple[float, float]:
    """Return the loss over all labels, and the share of the words of answers that are predicted."""
    total, count, right = 0.0, 0, 0
    pipe.eval()
    for start in range(0, len(rows), BATCH_SIZE):
        batch = collate(rows[start : start + BATCH_SIZE])
        labels, own = batch["labels"][:, 1:], count_labels(batch)
        total, count = total + own * float(pipe.evaluate(batch)), count + own
        words = pipe.forward(batch).logits[:, :-1].argmax(-1).cpu()
        right += int((words == labels).sum())
    pipe.train()
    return total / count, right / count


def train(pipe: penstock.Pipeline, options: argparse.Namespace, folder: Path, *, is_first: bool) -> None:
    """Train with checkpoints, from the last one in the folder if there is one."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / options.steps))
    batches = penstock.feed(make_loader(make_rows(options.rows, seed=1), seed=2), pipe)
    saved = {"optimizer": optimizer, "scheduler": rate, "data": batches}
    with penstock.Checkpoints(folder / "checkpoints", pipe, **saved) as checkpoints:
        restored = checkpoints.restore()
        first = 1 if restored is None else restored.step + 1
        if is_first and restored is not None:
            print(f"continues after step {restored.step}")
        groups = updates(batches, options.accumulate)
        for step in range(first, min(options.steps, options.stop or options.steps) + 1):
            loss = run_update(pipe, next(groups))
            norm = float(pipe.clip_grad_norm_(CLIP))
            optimizer.step()
            rate.step()
            optimizer.zero_grad()
            if is_first:
                print(f"step {step}: loss {loss:.8f}, norm {norm:.6f}", flush=True)
            if step % options.save_every == 0 or step == options.stop:
                checkpoints.save(step)


def main() -> None:
    """Load, train, evaluate and export."""
    options = read_options()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder, is_first = Path(options.folder), int(os.environ.get("RANK", "0")) == 0
    start = Path(options.model or folder / f"start-{os.environ.get('RANK', '0')}")
    if not options.model:
        write_small_model(start)
    example = collate(make_rows(BATCH_SIZE, seed=0))
    with penstock.Pipeline(
        empty_model(start),
        weights=start,
        example=example,
        lanes=2,
        micro_batches=4,
        autocast=torch.bfloat16 if options.bf16 else None,
    ) as pipe:
        train(pipe, options, folder, is_first=is_first)
        loss, right = evaluate(pipe, make_rows(options.rows // 4, seed=3))
        pipe.save_pretrained(folder / "model", overwrite=True)
    if is_first:
        print(f"validation: loss {loss:.8f}, {right:.1%} of the words right; the model is in {folder / 'model'}")


def read_options() -> argparse.Namespace:
    """Return the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder written by save_pretrained; by default a small random model")
    parser.add_argument("--folder", default="finetune", help="folder for checkpoints and the final model")
    parser.add_argument("--steps", type=int, default=60, help="updates; the learning rate falls to 0 over them")
    parser.add_argument("--stop", type=int, help="stop after this step, with a checkpoint")
    parser.add_argument("--rows", type=int, default=400, help="rows to train with")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per update")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--bf16", action="store_true", help="run forwards in bf16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
