"""The limit of a step: its matrix products and attentions alone, with nothing between them and nobody to wait for.

Each stage's are on a stream of its own, all in one CUDA graph. What a pipeline does besides (norms, activations, the
loss, adding up gradients, handing on) would have to be free, or hidden behind these, to reach it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Limit:
    """A step without its small kernels; it computes nothing of use."""

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
        streams = [torch.cuda.Stream() for _ in range(stages)]

        def run() -> None:
            now = torch.cuda.current_stream()
            for number, stream in enumerate(streams):
                stream.wait_stream(now)
                with torch.cuda.stream(stream):
                    for _ in range(micro_batches):
                        for _ in range(depth // stages):
                            self._block(shapes)
                        if number == stages - 1:
                            self._products(*heading)
            for stream in streams:
                now.wait_stream(stream)

        run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            run()

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


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
