"""Time the seeding of random generators before a replay: a graph with 64 dropouts and 1 to 64 generators. Needs a GPU.

`python benchmarks/gpu/generators.py`
"""

from __future__ import annotations

import time

import torch

DROPOUTS, REPLAYS = 64, 200


def microseconds_of(count: int) -> tuple[float, float]:
    """Return the host time and the total time of one replay with `count` generators, in microseconds."""
    generators = [torch.Generator("cuda") for _ in range(count)]
    x = torch.ones(1024, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        graph.capture_begin()
        for number in range(DROPOUTS):
            torch.ops.aten._fused_dropout(x, 0.5, generators[number % count])
        graph.capture_end()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            for seed, generator in enumerate(generators):
                generator.manual_seed(seed)
            graph.replay()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        whole = time.perf_counter() - begin
    return 1e6 * host / REPLAYS, 1e6 * whole / REPLAYS


if __name__ == "__main__":
    for count in (1, 4, 16, 64):
        host, whole = microseconds_of(count)
        print(f"{count:>3} generators: host {host:6.1f} µs, whole {whole:6.1f} µs")
