"""Train a GPT of 24 × 1024, batch 32 × 1024, in 4 stages on one GPU.

Contenders: Penstock, a plain loop, a loop captured by hand, and torch.distributed.pipelining (the peer).
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from clock import milliseconds, spread
from limit import Limit
from models import gpt, word_loss, words
from torch import nn

import penstock

STAGES = 4
BATCH = 32
# lets Inductor reduce a norm's gradients for input and weights in one kernel; by default only in large batches
MIXED = {"triton.mix_order_reduction_non_strict_mode": True}


@dataclass
class Found:
    """The measurements of one contender."""

    times: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    error: float = 0.0  # largest relative error of a gradient, by norm, compared with the plain loop
    num_syncs: int = -1  # how often the host waits for the GPU in a step
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.times) if self.times else float("nan")


class Plain:
    """The model without a pipeline, in micro-batches."""

    def __init__(self, model: nn.Module, micro_batches: int) -> None:
        self.model, self.micro_batches = model, micro_batches

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device="cuda")
        for x, y in zip(batch.chunk(self.micro_batches), target.chunk(self.micro_batches), strict=True):
            loss = word_loss(self.model(x), y) / self.micro_batches
            loss.backward()
            total += loss.detach()
        return total


class HandCaptured:
    """Hand-written: the same loop as one CUDA graph. The graph also clears the gradients."""

    def __init__(self, model: nn.Module, micro_batches: int, batch: torch.Tensor, target: torch.Tensor) -> None:
        plain = Plain(model, micro_batches)
        self.batch, self.target = batch.clone(), target.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                plain.step(self.batch, self.target)
                model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            model.zero_grad(set_to_none=True)
            self.total = plain.step(self.batch, self.target)

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.batch.copy_(batch)
        self.target.copy_(target)
        self.graph.replay()
        return self.total


class Ours:
    def __init__(self, model: nn.Sequential, micro_batches: int, example: torch.Tensor, **options: object) -> None:
        cuts = [1 + (len(model) - 2) * k // STAGES for k in range(1, STAGES)]
        self.pipe = penstock.Pipeline(
            model, example=example, loss=word_loss, micro_batches=micro_batches, devices=["cuda:0"] * STAGES, cuts=cuts,
            **options,
        )  # fmt: skip

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.pipe.step(batch, target)

    def close(self) -> None:
        self.pipe.close()


class Peer:
    """torch.distributed.pipelining: one rank that holds all four stages, as its interleaved schedules allow."""

    def __init__(self, model: nn.Sequential, micro_batches: int, schedule: str) -> None:
        from torch.distributed import pipelining

        if not torch.distributed.is_initialized():
            store = tempfile.mktemp()
            os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
            torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
            os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
        bounds = [0, *(1 + (len(model) - 2) * k // STAGES for k in range(1, STAGES)), len(model)]
        device = torch.device("cuda:0")
        stages = [pipelining.PipelineStage(model[a:b], s, STAGES, device) for s, (a, b) in enumerate(pairwise(bounds))]
        kinds = {
            "1f1b": pipelining.ScheduleInterleaved1F1B,
            "zb_h1": pipelining.ScheduleInterleavedZeroBubble,
        }
        self.schedule = kinds[schedule](stages, micro_batches, loss_fn=word_loss)

    def step(self, batch: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        self.schedule.step(batch, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()


def syncs_of(step: Callable[[], object]) -> int:
    """Return how often the host waits for the GPU in a step, as torch's sync debug mode reports."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in told)


def contenders(micro_batches: int) -> dict[str, Callable[..., object]]:
    """Return the contenders by name, each as a function of the model and a batch that returns an object with `step`."""
    m = micro_batches
    found: dict[str, Callable[..., object]] = {
        "plain loop": lambda model, x, y: Plain(model, m),
        "hand-captured": lambda model, x, y: HandCaptured(model, m, x, y),
        "ours, 1f1b": lambda model, x, y: Ours(model, m, x, schedule="1f1b"),
        "ours, 1f1b, eager": lambda model, x, y: Ours(model, m, x, schedule="1f1b", graphs=False),
        "peer, 1f1b": lambda model, x, y: Peer(model, m, "1f1b"),
        "ours, zb_h1": lambda model, x, y: Ours(model, m, x, schedule="zb_h1"),
        "peer, zero-bubble": lambda model, x, y: Peer(model, m, "zb_h1"),
    }
    if m != 8:
        return {name: make for name, make in found.items() if name not in ("plain loop", "ours, 1f1b, eager")}
    found["ours, recompute"] = lambda model, x, y: Ours(model, m, x, schedule="1f1b", keep="recompute")
    found["products alone"] = lambda model, x, y: Limit(m, stages=STAGES, batch=len(x))
    found["ours, compiled"] = lambda model, x, y: Ours(model, m, x, schedule="1f1b", compile=True)
    found["ours, compiled, mixed"] = lambda model, x, y: Ours(model, m, x, schedule="1f1b", compile=MIXED)
    return found


def compile_only() -> None:
    """Compile all compiled contenders, to fill torch's cache on disk."""
    model, (batch, target) = gpt().cuda().bfloat16(), words(BATCH, 1024)
    for options in (True, MIXED):
        ours = Ours(model, 8, batch, schedule="1f1b", compile=options, graphs=False)
        ours.step(batch, target)
        ours.close()


def run(micro_batches: int, only: str = "", repeats: int = 10, **shape: int) -> dict[str, Found]:
    """Time all contenders. Each first trains a step, whose gradients are compared with those of the plain loop."""
    torch.manual_seed(0)
    length = shape.get("length", 1024)
    model = gpt(**shape).cuda().bfloat16()
    batches = [words(BATCH, length) for _ in range(4)]
    reference = copy.deepcopy(model)
    Plain(reference, micro_batches).step(*batches[0])
    wanted = [p.grad.float() for p in reference.parameters()]
    del reference
    found: dict[str, Found] = {}
    for name, make in contenders(micro_batches).items():
        if only and not any(part in name for part in only.split(",")):
            continue
        gc.collect()
        torch.cuda.empty_cache()
        own, at = copy.deepcopy(model), 0
        before = torch.cuda.memory_reserved()
        result = found[name] = Found()
        try:
            made = make(own, *batches[0])
            clears = not isinstance(made, HandCaptured)  # that one clears gradients itself

            def step(own: nn.Module = own, made: object = made, clears: bool = clears) -> object:
                nonlocal at
                at += 1
                if clears:
                    own.zero_grad(set_to_none=True)
                return made.step(*batches[at % len(batches)])

            # Penstock captures graphs in the second step; the peer takes seconds per step
            for _ in range(1 if isinstance(made, Peer) else 3):
                step()
            if clears:
                own.zero_grad(set_to_none=True)
            made.step(*batches[0])
            if not isinstance(made, Limit):
                result.error = max(
                    float((p.grad.float() - w).norm() / w.norm()) for p, w in zip(own.parameters(), wanted, strict=True)
                )
            result.num_syncs = syncs_of(step)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # releases memory that only the construction needed
            torch.cuda.reset_peak_memory_stats()
            result.times = milliseconds(step, repeats=repeats, warm=1)
            # for graphs, this is their memory pool: torch does not report how much of it they use
            result.peak_bytes = max(0, torch.cuda.max_memory_reserved() - before)
            if hasattr(made, "close"):
                made.close()
        except Exception as error:
            traceback.print_exc()
            result.note = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
        made = step = None
        print(
            f"  {micro_batches:>3} × {name:<22} {spread(result.times) if result.times else '–':<26} ms"
            f"  {result.peak_bytes / 2**30:6.2f} GiB  off by {result.error:.1e}"
            f"  {result.num_syncs} syncs  {result.note}",
            flush=True,
        )
    return found


def verdict(at: dict[int, dict[str, Found]]) -> list[tuple[str, float, str]]:
    """Return each goal: what is compared, the measured ratio, and the goal."""

    def over(count: int, one: str, other: str) -> float:
        found = at.get(count, {})
        return found[one].median / found[other].median if one in found and other in found else float("nan")

    def memory(one: str, other: str) -> float:
        found = at.get(8, {})
        return found[one].peak_bytes / max(1, found[other].peak_bytes) if one in found and other in found else 0.0

    return [
        ("1f1b, 8: ours over hand-captured", over(8, "ours, 1f1b", "hand-captured"), "<= 1.03"),
        ("1f1b, 8: peer over ours", over(8, "peer, 1f1b", "ours, 1f1b"), ">= 1.5"),
        ("1f1b, 32: ours over hand-captured", over(32, "ours, 1f1b", "hand-captured"), "<= 1.05"),
        ("1f1b, 32: peer over ours", over(32, "peer, 1f1b", "ours, 1f1b"), ">= 3"),
        ("zero-bubble, 8: ours over our 1f1b", over(8, "ours, zb_h1", "ours, 1f1b"), "<= 1.10"),
        ("zero-bubble, 32: ours over our 1f1b", over(32, "ours, zb_h1", "ours, 1f1b"), "<= 1.10"),
        ("zero-bubble, 8: peer over ours", over(8, "peer, zero-bubble", "ours, zb_h1"), ">= 2.5"),
        ("zero-bubble, 32: peer over ours", over(32, "peer, zero-bubble", "ours, zb_h1"), ">= 6"),
        ("compiled over not, 8", over(8, "ours, compiled", "ours, 1f1b"), "<= 0.92"),
        ("compiled with other options over not, 8", over(8, "ours, compiled, mixed", "ours, 1f1b"), "<= 0.92"),
        ("products and attention alone over ours, 8", over(8, "products alone", "ours, 1f1b"), "the limit of it"),
        ("peak memory, graphs over eager", memory("ours, 1f1b", "ours, 1f1b, eager"), "<= 1.05"),
        ("recompute over hold, 8", over(8, "ours, recompute", "ours, 1f1b"), "<= 1.30"),
        ("host syncs in a step", float(at[8]["ours, 1f1b"].num_syncs if "ours, 1f1b" in at.get(8, {}) else -1), "0"),
    ]
