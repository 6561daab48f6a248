"""Generate four requests over two lanes, beside plain `model.generate`: one by one, and as one batch.

python benchmarks/generate/run.py [--repeats 7] [--width 256] [--layers 8] [--new-tokens 64] [--lanes processes|threads]

With `--lanes processes`, the script starts itself twice under torchrun, with one torch thread per process. While the
plain contenders run with two threads in the first process, the second process waits.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from penstock.infer import generate

LENGTHS = (24, 40, 32, 28)
VOCABULARY = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--lanes", choices=("processes", "threads"), default="processes")
    return parser.parse_args()


def make_model(given: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=given.width, intermediate_size=3 * given.width,
        num_hidden_layers=given.layers, num_attention_heads=given.width // 64,
        num_key_value_heads=max(1, given.width // 128), max_position_embeddings=1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def contenders(
    model: LlamaForCausalLM, prompts: list[torch.Tensor], given: argparse.Namespace
) -> dict[str, tuple[int, bool, Callable[[], list[torch.Tensor]]]]:
    """Return each contender: its threads, whether all processes run it, and a function that returns the new tokens."""
    options = {"max_new_tokens": given.new_tokens, "do_sample": False}

    def one_by_one(plain: LlamaForCausalLM) -> list[torch.Tensor]:
        return [plain.generate(prompt[None], **options)[0, len(prompt) :] for prompt in prompts]

    def one_batch() -> list[torch.Tensor]:
        batch = padded(prompts)
        return list(model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :])

    def over_lanes(groups: int | None) -> list[torch.Tensor]:
        found = generate(model, prompts, max_new_tokens=given.new_tokens, groups=groups)
        return [tokens[len(prompt) :] for tokens, prompt in zip(found, prompts, strict=True)]

    threads = 1 if given.lanes == "processes" else 2
    made = {
        "model.generate, one by one": (2, False, lambda: one_by_one(model)),
        "model.generate, one batch of 4": (2, False, one_batch),
        "penstock, two groups": (threads, True, lambda: over_lanes(2)),
        "penstock, one group": (threads, True, lambda: over_lanes(1)),
        "penstock, groups chosen": (threads, True, lambda: over_lanes(None)),
    }
    dispatched = dispatched_model(model)
    if dispatched is not None:
        made["accelerate, device_map, one by one"] = (2, False, lambda: one_by_one(dispatched))
    return made


def dispatched_model(model: LlamaForCausalLM) -> LlamaForCausalLM | None:
    """Return a copy of the model with the hooks of accelerate; None if accelerate is not installed."""
    try:
        from accelerate import dispatch_model
    except ImportError:
        return None
    names = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    names |= {f"model.layers.{at}": "cpu" for at in range(len(model.model.layers))}
    return dispatch_model(copy.deepcopy(model), names, main_device="cpu", force_hooks=True)


def measure(given: argparse.Namespace) -> None:
    is_first = int(os.environ.get("RANK", "0")) == 0
    model, prompts = make_model(given), make_prompts()
    made = contenders(model, prompts, given)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    tokens: dict[str, list[list[int]]] = {}
    for repeat in range(given.repeats + 1):  # the first repeat warms up
        for name, (threads, is_everywhere, run) in made.items():
            torch.set_num_threads(threads if is_first or is_everywhere else 1)
            if dist.is_initialized():
                dist.barrier()
            if not (is_first or is_everywhere):
                continue
            start = time.perf_counter()
            tokens[name] = [found.tolist() for found in run()]
            took = time.perf_counter() - start
            if repeat:
                seconds[name].append(took)
            if is_first:
                print(f"repeat {repeat}: {name}: {took:.2f} s", file=sys.stderr, flush=True)
    if is_first:
        report(given, seconds, tokens)


def report(given: argparse.Namespace, seconds: dict[str, list[float]], tokens: dict[str, list[list[int]]]) -> None:
    first, batch = list(seconds)[:2]
    count = len(LENGTHS) * given.new_tokens
    weights = sum(weight.numel() for weight in make_model(given).parameters()) / 1e6
    print(f"\nLlama, {given.layers} layers x {given.width}, {weights:.0f} M weights, float32; lanes: 2 {given.lanes}")
    print(f"4 requests, prompts of {LENGTHS} tokens, {given.new_tokens} new tokens each; {given.repeats} repeats\n")
    print("| | tokens/s | ÷ one by one | ÷ one batch | fastest ÷ one by one | fastest ÷ one batch | same tokens |")
    print("|---|---|---|---|---|---|---|")
    for name, times in seconds.items():
        ratios = ([a / b for a, b in zip(seconds[other], times, strict=True)] for other in (first, batch))
        cells = [spread([count / each for each in times], 0), *(spread(found, 2) for found in ratios)]
        cells += [f"{min(seconds[other]) / min(times):.2f}" for other in (first, batch)]
        print(f"| {name} | {' | '.join(cells)} | {'yes' if tokens[name] == tokens[first] else 'no'} |")


def spread(values: list[float], digits: int) -> str:
    """Return the median, and the lowest and the highest value."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def main() -> None:
    given = arguments()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    if given.lanes == "processes" and "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *sys.argv]
        sys.exit(subprocess.run(command, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode)
    if given.lanes == "processes":
        dist.init_process_group("gloo")
    measure(given)


if __name__ == "__main__":
    main()
