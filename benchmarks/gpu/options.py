"""Compare options of Inductor with plain `compile=True`: the GPT with 8 micro-batches, the towers at batch 1 and 32.

This section compiles for minutes, so it does not run by default. Run it with `python benchmarks/gpu/run.py options`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable

import torch
from clock import milliseconds, spread
from models import gpt, words
from towers import Towers, data_of

from penstock.compile.options import Compile
from penstock.infer import Graph
from training import BATCH, MIXED, Ours

ROUNDS = 4  # options run in turn, because the clock rate of the GPU changes
OPTIONS: dict[str, Compile] = {
    "not compiled": False,
    "compiled": True,
    "mixed": MIXED,
    "dependent launches": {"triton.enable_pdl": True},
}


def compare(name: str, make: Callable[[Compile], Callable[[], object]]) -> None:
    """Time a job with all options in turn; print the medians, and their ratios to the job without compilation."""
    runs: dict[str, Callable[[], object]] = {}
    for options, given in OPTIONS.items():
        begin = time.perf_counter()
        try:
            runs[options] = make(given)
            for _ in range(3):
                runs[options]()
            torch.cuda.synchronize()
        except Exception as error:  # this torch does not have the option, or it fails
            runs.pop(options, None)
            print(f"  {name}: {options:<20} {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        print(f"  {name}: {options:<20} made in {time.perf_counter() - begin:.0f} s", flush=True)
    times: dict[str, list[float]] = {options: [] for options in runs}
    for _ in range(ROUNDS):
        for options, run in runs.items():
            times[options] += milliseconds(run)
    base = statistics.median(times["not compiled"])
    for options, found in times.items():
        ratio = statistics.median(found) / base
        print(f"  {name}: {options:<20} {spread(found):<26} ms  {ratio:.3f} of not compiled", flush=True)


def run() -> None:
    """Compare all options in all jobs."""
    torch.manual_seed(0)
    batch, target = words(BATCH, 1024)
    model = gpt().cuda().bfloat16()

    def training(given: Compile) -> Callable[[], object]:
        own = copy.deepcopy(model)
        ours = Ours(own, 8, batch, schedule="1f1b", compile=given)

        def step() -> object:
            own.zero_grad(set_to_none=True)
            return ours.step(batch, target)

        return step

    compare("GPT, 8 micro-batches", training)
    towers = Towers().cuda().bfloat16().eval()
    for size in (1, 32):
        example = data_of(size)

        def inference(given: Compile, example: tuple[torch.Tensor, torch.Tensor] = example) -> Callable[[], object]:
            graph = Graph(towers, example, compile=given)
            return lambda: graph(*example)

        compare(f"towers, batch {size}", inference)
