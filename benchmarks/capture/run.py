"""Measure what it costs to capture a model and to run it as stages, by export and by replay.

    .venv/bin/python benchmarks/capture/run.py [--rounds 9] [--stages 4]

The script times forward and backward of one micro-batch, with all stages one after the other in one process. It
compares this with the same call of the plain model. Each round times all contenders in turn, so that load on the
machine affects all of them. Figures are medians; brackets show the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.model.capture.capture import capture
from penstock.model.profiling.measure import measure
from penstock.model.small_models.named_models import load
from penstock.planning.partition.partition import partition


def gpt(width: int, layers: int, length: int, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        vocab_size=1024,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(0, 1024, (batch, length))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone()}


def opt(width: int, layers: int, length: int, batch: int) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        vocab_size=1024,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
    )
    ids = torch.randint(2, 1024, (batch, length))
    return OPTForCausalLM(config), {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "GPT-2, 12 × 128, 2 × 64 tokens": lambda: gpt(128, 12, 64, 2),
    "GPT-2, 8 × 512, 2 × 128 tokens": lambda: gpt(512, 8, 128, 2),
    "OPT, 12 × 256, 2 × 128 tokens": lambda: opt(256, 12, 128, 2),
    "ViT, small": lambda: load("vit"),
    "T5, small": lambda: load("t5"),
}


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def step(call: Callable[..., Any], example: dict[str, Any], parameters: list[nn.Parameter]) -> None:
    call(**example).loss.backward()
    for parameter in parameters:
        parameter.grad = None


def compare(name: str, stages: int, rounds: int) -> str:
    """Return one row of the table."""
    torch.manual_seed(0)
    model, example = MODELS[name]()
    model.train()
    parameters = list(model.parameters())
    runs: dict[str, Callable[..., Any]] = {"plain": model}
    captured_in = {}
    for path in ("export", "replay"):
        begin = time.perf_counter()
        try:
            captured = capture(model, example, path=path)
        except Exception as error:
            captured_in[path] = f"– ({str(error).split(':')[0][:40]})"
            continue
        captured_in[path] = f"{time.perf_counter() - begin:.1f} s"
        cuts = partition(measure(captured, seconds_budget=1.0), stages=stages).cuts
        runs[path] = captured.split(cuts)
    for call in runs.values():
        step(call, example, parameters)  # warm up
    times: dict[str, list[float]] = {path: [] for path in runs}
    for _ in range(rounds):
        for path, call in runs.items():
            times[path].append(seconds(lambda call=call: step(call, example, parameters)))
    plain = statistics.median(times["plain"])
    cells = [name, f"{plain * 1e3:.1f} ms"]
    for path in ("export", "replay"):
        cells += [captured_in[path], _ratios(times[path], times["plain"]) if path in times else "–"]
    over = sorted((a - b) / stages * 1e3 for a, b in zip(times["replay"], times["plain"], strict=True))
    return "| " + " | ".join([*cells, f"{statistics.median(over):.2f} ms [{over[0]:.1f}–{over[-1]:.1f}]"]) + " |"


def _ratios(times: list[float], plain: list[float]) -> str:
    ratios = sorted(a / b for a, b in zip(times, plain, strict=True))
    return f"{statistics.median(ratios):.3f} [{ratios[0]:.2f}–{ratios[-1]:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--stages", type=int, default=4)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {given.stages} stages, medians of {given.rounds} rounds", end="\n\n")
    print("| model | plain step | export: capture | step ÷ plain", end=" ")
    print("| replay: capture | step ÷ plain | replay adds, per stage |")
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        print(compare(name, given.stages, given.rounds), flush=True)


if __name__ == "__main__":
    main()
