"""Measure the time saved by not computing rows that a model does not use: its program with all rows and with fewer.

    python benchmarks/rows/run.py [--batch 8] [--repeats 9]

On a CPU, the script runs the program of a Graph one operation after the other. On a GPU, it runs the Graph itself. Both
are compared with the model compiled by torch.compile. FLOPs are torch's own count of matrix products and attentions,
divided by the count for all rows. This share is the lower limit for the share of the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.infer import Graph
from penstock.infer.graph import program_analysis as reading
from penstock.infer.graph.inference_program import Program
from penstock.model.example import read_example

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from towers import VOCABULARY, WORDS, Towers

LENGTH = 128


class NextWord(nn.Module):
    """A language model in the simplest code: it computes the logits of all positions and returns those of the last."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, max_position_embeddings=LENGTH, **sizes))

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits[:, -1]


def models(batch: int, device: str) -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    images, words = torch.randn(batch, 3, 224, 224), torch.randint(0, VOCABULARY, (batch, WORDS))
    found: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "two towers, a token of each": (Towers(), (images, words)),
        "Llama of 8 × 512, the last word": (NextWord(), (torch.randint(0, 32000, (batch, LENGTH)),)),
    }
    return {name: (m.to(device).eval(), tuple(t.to(device) for t in given)) for name, (m, given) in found.items()}


def made(model: nn.Module, example: tuple[Tensor, ...], *, leaves_out: bool) -> Callable[[], object]:
    """Return a function that runs the program of the model once."""
    rule = reading.use_fewer_rows
    if not leaves_out:
        reading.use_fewer_rows = lambda graph, shown: 0
    try:
        if example[0].is_cuda:
            graph = Graph(model, example)
            return lambda: (graph(*example), torch.cuda.synchronize())
        program = Program(model, read_example(example, model), most=1)
    finally:
        reading.use_fewer_rows = rule
    interpreter = program.interpreter(None)
    arguments = [*program.held(), *program.values(example), len(example[0])]
    once = interpreter.make_once(arguments)
    return lambda: interpreter.run(arguments, once)


def compiled(model: nn.Module, example: tuple[Tensor, ...]) -> Callable[[], object]:
    """Return a function that runs the model compiled by torch."""
    quick = torch.compile(model, dynamic=False)
    return lambda: (quick(*example), torch.cuda.synchronize() if example[0].is_cuda else None)


def count(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}, float32, batch {given.batch}, medians of {given.repeats} in turn")
    print("| model | all rows, ms | torch.compile, ms | used rows, ms | ÷ all rows | ÷ torch.compile | FLOPs |")
    print("|---|---|---|---|---|---|---|")
    for name, (model, example) in models(given.batch, device).items():
        runs = [
            made(model, example, leaves_out=False),
            compiled(model, example),
            made(model, example, leaves_out=True),
        ]
        times: list[list[float]] = [[], [], []]
        for repeat in range(given.repeats + 1):  # the first repeat warms up
            for run, found in zip(runs, times, strict=True):
                begin = time.perf_counter()
                run()
                if repeat:
                    found.append(1e3 * (time.perf_counter() - begin))
        told = [f"{statistics.median(t):.1f} ({min(t):.1f}–{max(t):.1f})" for t in times]
        ratios = [f"{statistics.median(times[2]) / statistics.median(other):.2f}" for other in times[:2]]
        flops = "" if device == "cuda" else f"{count(runs[2]) / count(runs[0]):.2f}"
        print(f"| {name} | {' | '.join([*told, *ratios, flops])} |", flush=True)


if __name__ == "__main__":
    main()
