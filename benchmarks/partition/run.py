"""Measure how long partitioning takes, and compare the slowest stage with that of torchgpipe's balance.

    .venv/bin/python benchmarks/partition/run.py [--quick]

The script installs torchgpipe from PyPI into benchmarks/partition/.peers, without its dependencies, so that it runs on
the installed torch. torchgpipe runs in its own process: its profiler measures the layers and its solver balances them.
The cuts of both are compared twice: with the same times, and with times measured again.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock import Cluster, Link, schedules
from penstock.model.graph import Graph, Node, Parameter, Size, Value
from penstock.model.profile import Profile
from penstock.planning.partition.partition import partition

HERE = Path(__file__).parent
PEERS = HERE / ".peers"
SEED = 7


def graph_of(n: int, rng: np.random.Generator) -> Graph:
    """Return a random model: skips over up to 20 nodes, a parameter at about every third node, two tied parameters."""
    values, nodes = [Value("in", -1, (Size(0, 8),), "float32", 4)], []
    params = {"tied": Parameter("tied", 50_000_000), "mask": Parameter("mask", 1_000_000, False, True)}
    for i in range(n):
        inputs = [i] + ([int(i - rng.integers(2, 20))] if i > 20 and rng.random() < 0.2 else [])
        values.append(Value(f"v{i}", i, (Size(0, int(rng.integers(100, 5000))),), "float32", 4, has_grad=True))
        used = ["tied"] if i in (0, n - 1) else []
        used += ["mask"] if i % 50 == 0 else []
        if rng.random() < 0.3:
            params[f"p{i}"] = Parameter(f"p{i}", int(rng.integers(1000, 4_000_000)))
            used.append(f"p{i}")
        nodes.append(Node(f"n{i}", "op", "", tuple(inputs), (i + 1,), tuple(used)))
    return Graph(tuple(nodes), tuple(values), (0,), (n,), params)


def random_profile(n: int, seed: int, *, heavy: bool = False) -> Profile:
    rng = np.random.default_rng(seed)
    graph = graph_of(n, rng)
    forward = rng.lognormal(0, 1, n) * 1e-5
    if heavy:
        forward[n // 2] = forward.sum() / 20
    weight_grad = forward * 0.8 * (rng.random(n) < 0.5)
    saved, pending = rng.uniform(1e3, 2e6, n), rng.uniform(1e3, 1e6, n)
    return Profile(graph, 8, forward, forward * 0.9, weight_grad, saved, pending)


def scale_cases(quick: bool) -> list[tuple[str, int, int, str, dict[str, Any]]]:
    """Return the cases to time, each as (label, nodes, lanes, schedule, options)."""
    mixed, limited = {"mixed": True}, {"mixed": True, "memory": 0.7}
    cases = [
        ("one speed", 1_000, 16, "1f1b", {}),
        ("one speed", 10_000, 64, "1f1b", {}),
        ("mixed speeds, links", 10_000, 64, "1f1b", mixed),
        ("mixed speeds, links, hidden transfers", 10_000, 64, "zb_h1", mixed),
        ("mixed, memory limit, tied parameters", 10_000, 64, "1f1b", limited),
        ("the same, recomputed", 10_000, 64, "1f1b", {**limited, "memory": 0.3, "keep": "recompute"}),
        ("the same, one node as long as three stages", 10_000, 64, "1f1b", {**limited, "heavy": True}),
        ("two stages per lane", 10_000, 32, "interleaved_1f1b", {}),
        ("two stages per lane, V", 10_000, 32, "zb_v", {}),
        ("two stages per lane", 24, 4, "interleaved_1f1b", {}),
        ("two stages per lane", 100, 4, "interleaved_1f1b", {}),
    ]
    return cases[:5] if quick else [*cases, ("mixed, memory limit", 100_000, 64, "1f1b", limited)]


def time_scale(words: str, n: int, lanes: int, name: str, options: dict[str, Any], *, repeats: int) -> None:
    schedule = schedules.build(name, lanes=lanes, micro_batches=2 * lanes)
    rng = np.random.default_rng(SEED)
    asked = {"schedule": schedule, "keep": options.get("keep", "hold")}
    if "mixed" in options:
        asked["cluster"] = Cluster(speed=rng.uniform(0.5, 2, lanes).tolist(), link=Link(1e-6, 20e9))
    if "memory" in options:
        free = partition(random_profile(n, SEED, heavy="heavy" in options), schedule=schedule)
        asked["memory_limit"] = options["memory"] * max(free.lane_bytes)
    seconds = []
    for _ in range(repeats):
        profile = random_profile(n, SEED, heavy="heavy" in options)  # a new one each time, so that nothing is cached
        begin = time.perf_counter()
        found = partition(profile, **asked)
        seconds.append(time.perf_counter() - begin)
    stages = schedule.num_stages
    proof = "proved" if found.is_proved else f"at most {100 * found.gap:.2f} % from it"
    print(f"| {words} | {n:,} × {stages} | {name} | {spread(seconds)} | {proof} |", flush=True)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g}–{max(values):.3g})"


def get_peer() -> None:
    if not (PEERS / "torchgpipe").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            str(PEERS),
            "torchgpipe==0.0.5",
        ]
        subprocess.run(command, check=True)


def theirs(name: str, counts: list[int], timeout: float) -> dict[str, Any]:
    """Measure a model with torchgpipe's profiler and balance it with its solver; needs a process that has it."""
    import torch
    from models import MODELS
    from torchgpipe.balance import balance_cost
    from torchgpipe.balance.profile import profile_times

    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    module, sample = MODELS[name]()
    profile_times(module, sample, 0.3, torch.device("cpu"))  # warm up
    rounds = [profile_times(module, sample, timeout, torch.device("cpu")) for _ in range(2)]
    return {"times": rounds, "balance": {n: balance_cost(rounds[0], n) for n in counts}}


def balance_ours(times: list[int], stages: int) -> tuple[list[int], bool]:
    """Cut with Penstock, from the same times; return the layers of each stage and whether the cut is proved optimal."""
    n = len(times)
    values = [Value(f"v{i}", i - 1, (Size(0, 1),), "uint8", 1, has_grad=True) for i in range(n + 1)]
    nodes = [Node(f"n{i}", "layer", "", (i,), (i + 1,)) for i in range(n)]
    graph = Graph(tuple(nodes), tuple(values), (0,), (n,))
    none = np.zeros(n)
    found = partition(Profile(graph, 1, np.array(times, dtype=float), none, none, none, none), stages=stages)
    return np.diff([0, *found.cuts, n]).tolist(), found.is_proved


def slowest(times: list[int], balance: list[int]) -> int:
    ends = np.cumsum([0, *balance])
    return max(sum(times[a:b]) for a, b in pairwise(ends))


def compare(name: str, counts: tuple[int, ...], *, repeats: int, timeout: float) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PEERS), str(HERE)])}
    same, anew, proved = {n: [] for n in counts}, {n: [] for n in counts}, True
    for _ in range(repeats):
        command = [sys.executable, __file__, "theirs", json.dumps([name, counts, timeout])]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found = json.loads(run.stdout)
        first, second = found["times"]
        for n in counts:
            peer, (ours, is_proved) = found["balance"][str(n)], balance_ours(first, n)
            proved &= is_proved
            same[n].append(slowest(first, peer) / slowest(first, ours))
            anew[n].append(slowest(second, peer) / slowest(second, ours))
    layers = len(found["times"][0])
    for n in counts:
        print(
            f"| {name} | {layers} | {n} | {spread(same[n])} | {spread(anew[n])} | {'yes' if proved else 'no'} |",
            flush=True,
        )


def main() -> None:
    quick = "--quick" in sys.argv
    repeats = 2 if quick else 5
    print("| | nodes × stages | schedule | seconds | the optimum |\n|---|---|---|---|---|")
    for case in scale_cases(quick):
        time_scale(*case, repeats=repeats)
    get_peer()
    print("\ntorchgpipe's slowest stage divided by Penstock's; above 1, Penstock is faster\n")
    print("| model | layers | stages | same times | times measured again | Penstock's cut proved optimal |")
    print("|---" * 6 + "|")
    for name in ("vgg16", "resnet50", "gpt", "unet"):
        compare(name, (2, 4, 8), repeats=repeats, timeout=0.5 if quick else 2.0)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "theirs":
        print(json.dumps(theirs(*json.loads(sys.argv[2]))))
    else:
        main()
