"""Limits: only the matrix products and attentions of a job, without gaps and without waiting.

Each stage or tower has its own stream; all are in one CUDA graph. To reach this limit, everything else (norms,
activations, the loss, gradient accumulation, transfers) would have to take no time or run in parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional


class Limit:
    """A step without its small kernels. Its results have no meaning."""

    def __init__(
        self, micro_batches: int, *, stages: int, batch: int, depth: int = 24, width: int = 1024, length: int = 1024,
        vocabulary: int = 32768, heads: int = 16,
    ) -> None:  # fmt: skip
        rows = batch // micro_batches * length
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        heading = [(vocabulary, width)]
        shape = (batch // micro_batches, heads, length, width // heads)
        self._attended = [_random(*shape).requires_grad_() for _ in range(3)]
        self._weights = {s: (_random(*s), _random(s[0])) for s in {*shapes, *heading}}
        self._values = {size: _random(rows, size) for size in {size for shape in self._weights for size in shape}}

        def stage(number: int) -> None:
            for _ in range(micro_batches):
                for _ in range(depth // stages):
                    self._block(shapes)
                if number == stages - 1:
                    self._products(*heading)

        self._graph = _beside([partial(stage, number) for number in range(stages)])

    def step(self, batch: Tensor, target: Tensor) -> None:
        del batch, target
        self._graph.replay()

    def _block(self, shapes: list[tuple[int, int]]) -> None:
        for shape in shapes:
            self._products(shape)
        seen = functional.scaled_dot_product_attention(*self._attended, is_causal=True)
        torch.autograd.grad(seen, self._attended, seen.detach())

    def _products(self, shape: tuple[int, int]) -> None:
        weight, bias = self._weights[shape]
        given, made = self._values[shape[1]], self._values[shape[0]]
        functional.linear(given, weight, bias)
        made @ weight
        made.T @ given


class TowersLimit:
    """Two towers without their small kernels. The results have no meaning.

    The output uses one token, so the last block has only the operations that need all tokens.
    """

    def __init__(self, towers: list[tuple[int, int, int]], batch: int, *, depth: int = 12) -> None:
        self._graph = _beside([partial(self._tower, *self._made(*tower, batch, depth)) for tower in towers])

    def replay(self) -> None:
        self._graph.replay()

    @staticmethod
    def _made(width: int, heads: int, length: int, batch: int, depth: int) -> tuple[list[list[Tensor]], list[Tensor]]:
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        values = {size: _random(batch * length, size) for size in (width, 4 * width)}
        products = [[values[s[1]], _random(*s), _random(s[0])] for _ in range(depth) for s in shapes]
        return products, [_random(batch, heads, length, width // heads) for _ in range(3)]

    @staticmethod
    @torch.no_grad()
    def _tower(products: list[list[Tensor]], attended: list[Tensor]) -> None:
        for at, product in enumerate(products[:-3]):
            functional.linear(*product)
            if at % 4 == 0:
                functional.scaled_dot_product_attention(*attended)


def _beside(works: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph in which all `works` run in parallel, each on its own stream."""
    streams = [torch.cuda.Stream() for _ in works]

    def run() -> None:
        now = torch.cuda.current_stream()
        for work, stream in zip(works, streams, strict=True):
            stream.wait_stream(now)
            with torch.cuda.stream(stream):
                work()
        for stream in streams:
            now.wait_stream(stream)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
