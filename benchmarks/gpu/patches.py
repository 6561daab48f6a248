"""Time a convolution over patches in cuDNN and the same as a matrix product: microseconds, inside CUDA graphs.

This section does not run by default. Run it with `python benchmarks/gpu/run.py patches`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from clock import milliseconds
from torch import Tensor
from torch.nn import functional

BATCHES = (1, 8, 32, 128)
# input channels, size, patch, output channels; for the last two, `infer` makes no products: too many channels
SHAPES = (
    (3, 224, 32, 768),
    (3, 224, 16, 768),
    (3, 224, 14, 1024),
    (3, 224, 8, 384),
    (3, 224, 4, 96),
    (96, 56, 2, 192),
    (384, 14, 2, 768),
)
TYPES = (torch.bfloat16, torch.float16, torch.float32)
TIMES = 10  # calls inside one graph


def as_product(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    size = weight.shape[-1]
    rows = image.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5).flatten(3)
    return functional.linear(rows, weight.flatten(1), bias).permute(0, 3, 1, 2).contiguous()


def microseconds(call: Callable[[], Tensor]) -> float:
    """Return the microseconds of one call, from a graph with several calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMES):
            call()
    return statistics.median(milliseconds(graph.replay)) / TIMES * 1e3


@torch.no_grad()
def run() -> None:
    """Print both times and their ratio, for each dtype, shape and batch size."""
    for dtype in TYPES:
        for channels, size, patch, out in SHAPES:
            weight = torch.randn(out, channels, patch, patch, device="cuda", dtype=dtype)
            bias = torch.randn(out, device="cuda", dtype=dtype)
            found = []
            for batch in BATCHES:
                image = torch.randn(batch, channels, size, size, device="cuda", dtype=dtype)
                one = microseconds(partial(functional.conv2d, image, weight, bias, stride=patch))
                other = microseconds(partial(as_product, image, weight, bias))
                found.append(f"{batch}: {one:.0f} / {other:.0f} µs = {one / other:.2f}")
            name = str(dtype).removeprefix("torch.")
            print(f"  {name:<8} {channels:>3} × {size}², {patch} × {patch} → {out}: {'; '.join(found)}", flush=True)
