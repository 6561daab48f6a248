"""Compare `auto` with the best named schedule and with a proven optimum, on random uneven cases.

    .venv/bin/python benchmarks/auto/run.py [--quick]

For every case, the table shows the step time of 1f1b, of the best named schedule that fits the memory limit, of `auto`
(one copy of the weights, so that the proof is about the same placement) and of the exact solver's best schedule, and
the proven bound. Ratios are divided by the bound.
"""

import statistics
import sys
import time
from itertools import product

import numpy as np

import penstock
from penstock import Costs, schedules, simulate
from penstock.errors import PenstockError

SIZES = [(2, 4), (3, 6), (4, 8), (4, 12), (6, 12)]
NAMED = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_1p", "zb_2p")
TIME_LIMIT_SECONDS = 30.0


def case(lanes: int, seed: int, spread: float) -> tuple[Costs, float]:
    """Return costs and a memory limit, from large to small. With a large spread, the slowest lane is the bottleneck."""
    rng = np.random.default_rng(seed)
    column = rng.uniform(1 - spread, 1 + spread, (3, lanes)).round(2)
    saved = rng.uniform(1.5 * (1 - spread), 1.5 * (1 + spread), lanes).round(2)
    costs = Costs(
        forward=column[0],
        input_grad=column[1],
        weight_grad=(0.7 * column[2]).round(2),
        transfer=0.05,
        saved_bytes=saved,
        pending_bytes=(0.4 * saved).round(2),
    )
    return costs, float(saved.max() * rng.choice([lanes * 2, lanes, lanes * 0.75]))


def main() -> None:
    seeds = range(1 if "--quick" in sys.argv else 4)
    print("| lanes × micro-batches | spread | limit | 1f1b | best named schedule that fits | auto | exact | ", end="")
    print("proven bound | auto ÷ bound | auto s |")
    print("|---" * 10 + "|")
    ratios = []
    for lanes, mbs in SIZES:
        for seed, spread in product(seeds, (0.05, 0.35)):
            costs, limit = case(lanes, 100 * lanes + seed, spread)
            plain = simulate(schedules.build("1f1b", lanes=lanes, micro_batches=mbs), costs).step_seconds
            named = {name: step for name in NAMED if (step := fitting(name, lanes, mbs, costs, limit)) is not None}
            best = min(named, key=named.__getitem__, default="none")
            begin = time.perf_counter()
            auto = schedules.build(
                "auto", lanes=lanes, micro_batches=mbs, costs=costs, memory_limit=limit, two_ways=False
            )
            seconds = time.perf_counter() - begin
            step = simulate(auto, costs).step_seconds
            proof = penstock.schedules.prove(
                lanes=lanes, micro_batches=mbs, costs=costs, memory_limit=limit, time_limit_seconds=TIME_LIMIT_SECONDS
            )
            ratios.append(step / proof.bound_seconds)
            mark = "optimal" if proof.is_optimal else f"not proven in {TIME_LIMIT_SECONDS:.0f} s"
            print(
                f"| {lanes} × {mbs} | {spread:.0%} | {limit:.1f} | {plain:.2f} | {show(best, named)} | {step:.2f} | "
                f"{proof.draft.step_seconds:.2f} | {proof.bound_seconds:.2f} ({mark}) | {ratios[-1]:.4f} | "
                f"{seconds:.1f} |",
                flush=True,
            )
    num_optimal = sum(ratio < 1 + 1e-9 for ratio in ratios)
    print(f"\nauto ÷ proven bound: median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}; ", end="")
    print(f"equal to the bound in {num_optimal} of {len(ratios)} cases")


def show(best: str, named: dict[str, float]) -> str:
    return f"{best} {named[best]:.2f}" if named else "none fits"


def fitting(name: str, lanes: int, mbs: int, costs: Costs, limit: float) -> float | None:
    """Return the step time of a named schedule, or None if the schedule does not fit."""
    try:
        schedule = schedules.build(name, lanes=lanes, micro_batches=mbs, costs=costs, memory_limit=limit)
    except PenstockError:
        return None
    return simulate(schedule, costs).step_seconds


if __name__ == "__main__":
    main()
