"""The models: stages that sleep, a GPT, and stages with almost no work. Independent of all pipeline libraries."""

# ruff: noqa: ANN401 - arguments from autograd have no type
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SEED = 7
COLUMNS = 8  # sleeping stages compute with these columns of an activation and only pass on the others


@dataclass(frozen=True)
class Case:
    """One row of a table: a model that is cut for a schedule. Plain data, the same for all contenders."""

    model: str  # "sleeping", "gpt" or "linear"
    schedule: str
    lanes: int
    micro_batches: int
    stages_per_lane: int = 1
    threads: bool = False  # one process with one thread per lane; otherwise one process per lane
    mib: int = 1  # size of a micro-batch's activation, for sleeping stages
    batch: int = 32  # samples per step, for a GPT
    length: int = 128  # tokens per sample, for a GPT
    width: int = 512
    vocabulary: int = 4096
    nap_seconds: float = 0.01
    is_counted: bool = False  # count the bytes that autograd saves

    @property
    def num_stages(self) -> int:
        return self.lanes * self.stages_per_lane

    def without_sleep(self) -> Case:
        return replace(self, nap_seconds=0.0)


@dataclass
class Task:
    """The training of a case: the stages in order, a batch and the loss function."""

    stages: list[nn.Module]
    batch: Tensor
    target: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    boundary: tuple[int, ...]  # the shape of a micro-batch's activation between stages
    nap: Nap
    counts: list[Count] | None = None  # one per lane

    def plain(self, micro_batches: int = 1) -> Tensor:
        """Train a step without a pipeline; add the gradients to the parameters of the stages."""
        total = torch.zeros(())
        for x, y in zip(self.batch.chunk(micro_batches), self.target.chunk(micro_batches), strict=True):
            value = x
            for stage in self.stages:
                value = stage(value)
            loss = self.loss(value, y) / micro_batches
            loss.backward()
            total += loss.detach()
        return total

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(dict(enumerate(self.stages)))


def gradients_of(stages: dict[int, nn.Module]) -> dict[str, Tensor]:
    """Return gradients by stage and parameter name."""
    named = ((f"{s}.{name}", p.grad) for s, stage in stages.items() for name, p in stage.named_parameters())
    return {name: grad for name, grad in named if grad is not None}


def forget(stages: list[nn.Module]) -> None:
    """Drop all gradients."""
    for stage in stages:
        stage.zero_grad(set_to_none=True)


def make(case: Case) -> Task:
    """Make the model and the batch of a case, with the same numbers in every process."""
    torch.manual_seed(SEED)
    return {"sleeping": _sleeping, "gpt": _gpt, "linear": _linear}[case.model](case)


class Count:
    """The bytes that autograd holds for the stages of a lane: now, and the peak. Parameters do not count."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0


class _Held:
    """A saved tensor. When it is freed, its bytes are subtracted."""

    def __init__(self, tensor: Tensor, count: Count, uses: dict[tuple[int, int], int]) -> None:
        # Detached: otherwise an output and its autograd node hold each other, and without a backward neither is freed.
        self.tensor = tensor.detach()
        self.count, self.uses, self.size = count, uses, tensor.numel() * tensor.element_size()
        self.key = tensor.data_ptr(), self.size
        uses[self.key] = uses.get(self.key, 0) + 1
        if uses[self.key] == 1:
            count.now_bytes += self.size
            count.peak_bytes = max(count.peak_bytes, count.now_bytes)

    def __del__(self) -> None:
        self.uses[self.key] -= 1
        if not self.uses[self.key]:
            self.count.now_bytes -= self.size


class _Counted(nn.Module):
    """A stage that counts the bytes of its saved tensors."""

    def __init__(self, stage: nn.Module, count: Count) -> None:
        super().__init__()
        self.stage, self.count, self.uses = stage, count, {}

    def forward(self, x: Tensor) -> Tensor:
        own = {p.untyped_storage().data_ptr() for p in self.stage.parameters()}

        def pack(tensor: Tensor) -> Tensor | _Held:
            is_own = tensor.untyped_storage().data_ptr() in own
            return tensor if is_own else _Held(tensor, self.count, self.uses)

        def unpack(held: Tensor | _Held) -> Tensor:
            return held.tensor if isinstance(held, _Held) else held

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.stage(x)


def count_saved(task: Task, lane_of: list[int]) -> list[float]:
    """Make the stages of a task count the bytes they save; return the bytes that each saves alone for a micro-batch."""
    counts = [Count() for _ in range(max(lane_of) + 1)]
    alone, x = [], task.batch[: task.boundary[0]]
    for s, stage in enumerate(task.stages):
        count = Count()
        x = x.detach()
        x = x.requires_grad_() if x.is_floating_point() and s else x
        x = _Counted(stage, count)(x)
        alone.append(float(count.now_bytes))
    task.stages[:] = [_Counted(stage, counts[lane_of[s]]) for s, stage in enumerate(task.stages)]
    task.counts = counts
    return alone


# Stages that sleep. A micro-batch's activation has many columns. A stage reads the first 8, multiplies them by an
# 8 × 8 weight, and writes them into a new tensor, whose other columns stay uninitialised. These columns are sent like
# any activation, but nothing computes with them. So the clock shows only sleep and the time that the runtime adds.
#
#   x ──Read──► 8 columns ──linear──► 8 columns ──Write──► y      forward sleeps in Read
#    (sleeps: input gradient)  ▲                                  backward sleeps in Read, and in Weigh
#                weight ──Weigh┘ (sleeps: weight gradient)


class Nap:
    """Sleep for a given time, minus the smallest time by which this machine oversleeps."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over_seconds = min(self._oversleep(0.002) for _ in range(20)) if seconds else 0.0

    @staticmethod
    def _oversleep(seconds: float) -> float:
        begin = time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - begin - seconds

    def __call__(self) -> None:
        if self.seconds:
            time.sleep(self.seconds - self.over_seconds)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, nap: Nap | None) -> Tensor:
        ctx.shape, ctx.nap = x.shape, nap
        if nap is not None:
            nap()
        return x[:, :COLUMNS].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.nap is not None:
            ctx.nap()
        whole = torch.empty(ctx.shape)
        whole[:, :COLUMNS] = gradient
        return whole, None


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: int) -> Tensor:  # noqa: ARG004
        whole = torch.empty(x.shape[0], columns)
        whole[:, :COLUMNS] = x
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient[:, :COLUMNS].clone(), None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, nap: Nap) -> Tensor:
        ctx.nap = nap
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.nap()
        return gradient, None


class Linear(nn.Linear):
    """A linear layer that exposes the tensor it multiplies by, so that a hand-written loop can defer its gradient."""

    def used_weight(self) -> Tensor:
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.used_weight(), self.bias)


class _SleepyLinear(Linear):
    def __init__(self, nap: Nap) -> None:
        super().__init__(COLUMNS, COLUMNS, bias=False)
        self.nap = nap

    def used_weight(self) -> Tensor:
        return _Weigh.apply(self.weight, self.nap)


class _SleepyStage(nn.Module):
    def __init__(self, nap: Nap) -> None:
        super().__init__()
        self.nap = nap
        self.linear = _SleepyLinear(nap)

    def forward(self, x: Tensor) -> Tensor:
        return _Write.apply(self.linear(_Read.apply(x, self.nap)), x.shape[1])


def _first_columns_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(_Read.apply(output, None), target)


def _sleeping(case: Case) -> Task:
    rows, nap = 4, Nap(case.nap_seconds)
    columns = case.mib * 2**20 // 4 // rows
    batch = torch.empty(case.micro_batches * rows, columns)
    batch[:, :COLUMNS] = torch.randn(len(batch), COLUMNS)
    target = torch.randn(len(batch), COLUMNS)
    stages: list[nn.Module] = [_SleepyStage(nap) for _ in range(case.num_stages)]
    return Task(stages, batch, target, _first_columns_loss, (rows, columns), nap)


def _linear(case: Case) -> Task:
    """Return stages with almost no work, so that a step shows the cost of its actions."""
    stages: list[nn.Module] = [Linear(8, 8) for _ in range(case.num_stages)]
    batch, target = torch.randn(case.micro_batches * 8, 8), torch.randn(case.micro_batches * 8, 8)
    return Task(stages, batch, target, functional.mse_loss, (8, 8), Nap(0))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.into, self.out = Linear(width, 3 * width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.into(self.norm(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class _Embedding(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place.weight


# The number of half-blocks in each stage, so that all lanes have the same work. In units of width²: attention 4,
# feed-forward 8, a head of 8 × width words 8; 104 in total. Two stages have 52 each. Four stages have 28, 24, 24, 28
# for lanes 0 1 0 1. In a V, for lanes 0 1 1 0, they have 24, 28, 24, 28.
_GPT_HALVES = {2: (9, 7), 4: (5, 4, 4, 3)}
_GPT_HALVES_IN_A_V = (4, 5, 4, 3)


def _gpt(case: Case) -> Task:
    """Return a GPT of 8 blocks with an untied head. Stages end between half-blocks, so that lanes have equal work."""
    width = case.width
    halves = [half for _ in range(8) for half in (_Attention(width, 8), _Mlp(width))]
    stages, at = [], 0
    for count in _GPT_HALVES_IN_A_V if case.schedule == "zb_v" else _GPT_HALVES[case.num_stages]:
        stages.append(halves[at : at + count])
        at += count
    stages[0].insert(0, _Embedding(case.vocabulary, case.length, width))
    stages[-1] += [nn.LayerNorm(width), Linear(width, case.vocabulary)]
    ids = torch.randint(0, case.vocabulary, (case.batch, case.length + 1))
    boundary = (case.batch // case.micro_batches, case.length, width)
    modules: list[nn.Module] = [nn.Sequential(*stage) for stage in stages]
    return Task(modules, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), _word_loss, boundary, Nap(0))


def _word_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
