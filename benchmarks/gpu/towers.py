"""Two towers as in CLIP, for inference.

Contenders: eager, eager on two streams, one CUDA graph captured by hand, and Penstock's graph: on one stream, with
parallel branches, and with compiled branches. The limit is their matrix products and attentions alone; no way to run
these kernels can be faster.

All run in bf16: an image tower of 12 × 768 on 32 × 32 patches of a 224 × 224 image, and a text tower of 12 × 512 on 77
words. The data is on the GPU. The error of each contender is measured against the same weights in float64. The results
are cosines of unrelated vectors, so they are small and rounding to bf16 is visible.

The last contender is transformers' own CLIPModel (ViT-B/32, random weights), unchanged: eager, and with Penstock,
called as users call it.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from clock import milliseconds, ratio, spread
from limit import TowersLimit
from torch import Tensor, nn
from torch.nn import functional

from penstock.infer import Graph

BATCHES = (1, 8, 32)
WORDS, VOCABULARY = 77, 49408
SHAPES = [(768, 12, (224 // 32) ** 2 + 1), (512, 8, WORDS)]  # width, heads and tokens of the towers
OVER_EAGER = {1: 10.0, 8: 5.0, 32: 4.0}  # goals: eager time ÷ Penstock's time, by batch size
CLIP_OVER_EAGER = {1: 8.0}  # the same goal for transformers' own CLIPModel
OVER_ONE_STREAM = {1: 1.5, 8: 1.25, 32: 1.15}

Run = Callable[[Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Images(nn.Module):
    def __init__(self, depth: int = 12, width: int = 768, size: int = 224, patch: int = 32, out: int = 512) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.first = nn.Parameter(torch.randn(width) * 0.02)
        self.place = nn.Parameter(torch.randn((size // patch) ** 2 + 1, width) * 0.02)
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, width // 64, is_causal=False) for _ in range(depth)))
        self.project = nn.Linear(width, out, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], 1, -1), x], dim=1) + self.place
        return self.project(self.after(self.blocks(self.before(x))[:, 0]))


class Texts(nn.Module):
    def __init__(self, depth: int = 12, width: int = 512, out: int = 512) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Parameter(torch.randn(WORDS, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, width // 64, is_causal=True) for _ in range(depth)))
        self.after, self.project = nn.LayerNorm(width), nn.Linear(width, out, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.project(self.after(self.blocks(self.token(words) + self.place)[:, -1]))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = Images(), Texts()
        self.scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        return self.compare(self.images(images), self.texts(words))

    def compare(self, image: Tensor, text: Tensor) -> Tensor:
        return functional.normalize(image, dim=-1) @ functional.normalize(text, dim=-1).T * self.scale.exp()


class Eager:
    def __init__(self, model: Towers) -> None:
        self.model = model

    @torch.no_grad()
    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        return self.model(images, words)


class TwoStreams:
    """Hand-written: one stream per tower."""

    def __init__(self, model: Towers) -> None:
        self.model, self.side = model, torch.cuda.Stream()

    @torch.no_grad()
    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        now = torch.cuda.current_stream()
        self.side.wait_stream(now)
        with torch.cuda.stream(self.side):
            text = self.model.texts(words)
        image = self.model.images(images)
        now.wait_stream(self.side)
        text.record_stream(now)
        return self.model.compare(image, text)


class ByHand:
    """Hand-written: the whole model as one CUDA graph on one stream."""

    def __init__(self, model: Towers, example: tuple[Tensor, Tensor]) -> None:
        self.given = [tensor.clone() for tensor in example]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(3):
                model(*self.given)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), torch.no_grad():
            self.made = model(*self.given)

    def __call__(self, images: Tensor, words: Tensor) -> Tensor:
        self.given[0].copy_(images)
        self.given[1].copy_(words)
        self.graph.replay()
        return self.made.clone()


def compile_only(batches: tuple[int, ...] = BATCHES) -> None:
    """Compile all compiled contenders, to fill torch's cache on disk."""
    model = Towers().cuda().bfloat16().eval()
    for batch in batches:
        example = data_of(batch)
        Graph(model, example, compile=True)(*example)


def data_of(batch: int) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    return images, torch.randint(0, VOCABULARY, (batch, WORDS), device="cuda")


def contenders(model: Towers, example: tuple[Tensor, Tensor]) -> dict[str, Callable[[], Run]]:
    """Return the contenders by name, each as a function that makes it."""
    return {
        "eager": lambda: Eager(model),
        "eager, two streams": lambda: TwoStreams(model),
        "graph by hand": lambda: ByHand(model, example),
        "ours, one stream": lambda: Graph(model, example, branches=1),
        "ours": lambda: Graph(model, example),
        "ours, compiled": lambda: Graph(model, example, compile=True),
    }


def run(repeats: int = 20, batches: tuple[int, ...] = BATCHES) -> dict[int, dict[str, list[float]]]:
    """Time all contenders for each batch size; return the milliseconds of each run."""
    torch.manual_seed(0)
    model = Towers().cuda().bfloat16().eval()
    exact = copy.deepcopy(model).double()
    found: dict[int, dict[str, list[float]]] = {}
    for batch in batches:
        data = [data_of(batch) for _ in range(4)]
        times = found[batch] = {}
        with torch.no_grad():
            wanted = [exact(images.double(), words) for images, words in data]
        for name, make in contenders(model, data[0]).items():
            gc.collect()
            torch.cuda.empty_cache()
            contender = make()
            times[name], error = _times(contender, data, wanted, repeats)
            if name == "ours":
                told = contender.explain()
            contender = None
            print(f"  batch {batch:>2}  {name:<20} {spread(times[name]):<24} ms  off by {error:.1e}", flush=True)
        times["limit"] = milliseconds(TowersLimit(SHAPES, batch).replay, repeats=repeats)
        at_most = f"eager takes {ratio(times['eager'], times['limit']):.2f}× as long"
        print(f"  batch {batch:>2}  products alone       {spread(times['limit']):<24} ms  {at_most}", flush=True)
        for name, bar in (
            ("eager", OVER_EAGER), ("graph by hand", OVER_ONE_STREAM), ("ours, one stream", OVER_ONE_STREAM),
        ):  # fmt: skip
            reached = [ratio(times[name], times[own]) for own in ("ours", "ours, compiled")]
            both = f"{reached[0]:.2f}×, compiled {reached[1]:.2f}×"
            print(f"  batch {batch:>2}  ours over {name:<18} {both} (to reach: {bar[batch]:g}×)", flush=True)
    print(told, flush=True)
    run_clip(repeats, batches)
    return found


def run_clip(repeats: int = 20, batches: tuple[int, ...] = BATCHES) -> None:
    """Time the unchanged CLIPModel of transformers: eager, and with Penstock."""
    try:
        import transformers
    except ImportError:
        print("  CLIPModel of transformers: not installed, not run", flush=True)
        return
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig()).cuda().bfloat16().eval()
    exact = copy.deepcopy(model).double()
    for batch in batches:
        data = [data_of(batch) for _ in range(4)]
        with torch.no_grad():
            wanted = [_similarity(exact, images.double(), words) for images, words in data]
        graph = Graph(model, {"input_ids": data[0][1], "pixel_values": data[0][0]})
        times = {}
        for name, callee in (("eager", model), ("ours", graph)):
            with torch.no_grad():
                times[name], error = _times(partial(_similarity, callee), data, wanted, repeats)
            print(
                f"  batch {batch:>2}  CLIPModel, {name:<9} {spread(times[name]):<24} ms  off by {error:.1e}", flush=True
            )
        bar = f" (to reach: {CLIP_OVER_EAGER[batch]:g}×)" if batch in CLIP_OVER_EAGER else ""
        as_it_is = f"; runs as it is: {graph.obstacle}" if graph.obstacle else ""
        reached = ratio(times["eager"], times["ours"])
        print(f"  batch {batch:>2}  CLIPModel, ours over eager {reached:.2f}×{bar}{as_it_is}", flush=True)


def _similarity(model: Callable[..., Any], images: Tensor, words: Tensor) -> Tensor:
    return model(input_ids=words, pixel_values=images).logits_per_image


def _times(
    made: Run, data: list[tuple[Tensor, Tensor]], wanted: list[Tensor], repeats: int
) -> tuple[list[float], float]:
    """Return the milliseconds of each run, and the largest relative error of the results."""
    at = 0

    def once() -> Tensor:
        nonlocal at
        at += 1
        return made(*data[at % len(data)])

    for _ in range(5):
        once()
    results = [made(*one).double() for one in data]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(results, wanted, strict=True))
    return milliseconds(once, repeats=repeats, warm=3), error


if __name__ == "__main__":
    run()
