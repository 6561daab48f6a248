"""The floor: the smallest code that runs a lane of a schedule on isend and irecv. No library, no checks.

One tensor goes from stage to stage. A lane is a list of (kind, stage, micro-batch). The floor posts the next receive of
a stream as soon as the one before has arrived. It keeps sends until they are done. A linear layer queues its weight
gradient, so that it can be computed later.
"""

# ruff: noqa: ANN401 - arguments from autograd have no type
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tasks import Linear, Task, forget, gradients_of
from torch import Tensor, nn
from torch.nn import functional

Lane = list[tuple[str, int, int]]
Stream = tuple[str, int]  # F or B, and the receiving stage


class _Queued(torch.autograd.Function):
    """A linear layer that puts its weight gradient into a queue instead of computing it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, later: tuple[Tensor, list[Any]]) -> Tensor:
        weight, ctx.queue = later  # autograd does not look into the tuple, so it does not track the weight
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.save_for_backward(x)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        ctx.queue.append((ctx.weight, rows, x.flatten(0, -2)))
        into = gradient @ ctx.weight.detach() if ctx.needs_input_grad[0] else None
        return into, rows.sum(0) if ctx.has_bias else None, None


def _queue_weights(stage: nn.Module) -> list[Any]:
    """Make a stage's linear layers queue their weight gradients; return the queue."""
    queue: list[Any] = []
    for module in stage.modules():
        if isinstance(module, Linear):
            module.forward = lambda x, module=module: _call_queued(module, x, queue)
    return queue


def _call_queued(module: Linear, x: Tensor, queue: list[Any]) -> Tensor:
    x = x if x.requires_grad else x.detach().requires_grad_()  # otherwise autograd would not call this backward
    return _Queued.apply(x, module.bias, (module.used_weight(), queue))


@torch.no_grad()
def _compute_weights(queue: list[Any]) -> None:
    for weight, rows, x in queue:
        gradient = rows.t() @ x
        if weight.grad_fn is not None:
            weight.backward(gradient)
        elif weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad += gradient


class Floor:
    """One lane of a schedule."""

    def __init__(
        self, task: Task, lanes: list[Lane], lane_of: list[int], micro_batches: int, rank: int | None = None
    ) -> None:
        self.rank = dist.get_rank() if rank is None else rank
        self.lane, self.lane_of, self.num_mbs = lanes[self.rank], lane_of, micro_batches
        self.stages = {s: stage for s, stage in enumerate(task.stages) if lane_of[s] == self.rank}
        self.last = len(lane_of) - 1
        self.loss, self.boundary = task.loss, task.boundary
        self.most_sends = 2 * len(lane_of)
        is_split = any(kind == "W" for lane in lanes for kind, _, _ in lane)
        self.queues = {s: _queue_weights(stage) for s, stage in self.stages.items()} if is_split else {}
        self.streams: dict[Stream, list[int]] = {}
        for kind, s, mb in self.lane:
            stream = ("F" if kind == "F" else "B", s)
            if kind != "W" and self._source(stream) is not None:
                self.streams.setdefault(stream, []).append(mb)
        self.free: dict[Stream, list[Tensor]] = {stream: [] for stream in self.streams}
        self.run: dict[str, Callable[[int, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
        }

    def step(self, batch: Tensor, target: Tensor) -> Tensor | None:
        self.batches, self.targets = batch.chunk(self.num_mbs), target.chunk(self.num_mbs)
        self.total = torch.zeros(()) if self.last in self.stages else None
        self.saved: dict[tuple[int, int], Any] = {}
        self.local: dict[tuple[str, int, int], Tensor] = {}
        self.pending: dict[tuple[int, int], Any] = {}
        self.sends: deque[tuple[dist.Work, Tensor]] = deque()
        self.coming = {stream: iter(mbs) for stream, mbs in self.streams.items()}
        self.posted = {stream: self._post(stream) for stream in self.streams}
        for kind, s, mb in self.lane:
            self.run[kind](s, mb)
        for work, _ in self.sends:
            work.wait()
        return self.total

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.stages)

    def forget(self) -> None:
        forget(list(self.stages.values()))

    def close(self) -> None:
        pass

    # Actions

    def _forward(self, s: int, mb: int) -> None:
        x = self.batches[mb] if s == 0 else self._take("F", s, mb).detach().requires_grad_()
        y = self.stages[s](x)
        if s == self.last:
            y = self.loss(y, self.targets[mb]) / self.num_mbs
            self.total += y.detach()
        else:
            self._hand("F", s + 1, mb, y.detach())
        self.saved[s, mb] = x, y

    def _backward(self, s: int, mb: int) -> None:
        self._input_gradient(s, mb)
        self._weight_gradient(s, mb)

    def _input_gradient(self, s: int, mb: int) -> None:
        x, y = self.saved.pop((s, mb))
        gradient = None if s == self.last else self._take("B", s, mb)
        torch.autograd.backward(y, gradient)
        if s > 0:
            self._hand("B", s - 1, mb, x.grad)
        queue = self.queues.get(s, ())
        self.pending[s, mb] = x, gradient, list(queue)
        if queue:
            queue.clear()

    def _weight_gradient(self, s: int, mb: int) -> None:
        x, gradient, queue = self.pending.pop((s, mb))
        _compute_weights(queue)
        if ("F", s) in self.streams:
            self.free["F", s].append(x.detach())
        if ("B", s) in self.streams:
            self.free["B", s].append(gradient)

    # Transfers

    def _source(self, stream: Stream) -> int | None:
        """Return the lane that sends a stream; None if it is this lane or if there is none."""
        kind, s = stream
        before = s - 1 if kind == "F" else s + 1
        return self.lane_of[before] if 0 <= before <= self.last and self.lane_of[before] != self.rank else None

    def _tag(self, kind: str, s: int, mb: int) -> int:
        return ((kind == "B") * len(self.lane_of) + s) * self.num_mbs + mb

    def _post(self, stream: Stream) -> tuple[dist.Work, Tensor] | None:
        mb = next(self.coming[stream], None)
        if mb is None:
            return None
        free = self.free[stream]
        buffer = free.pop() if free else torch.empty(self.boundary)
        return dist.irecv(buffer, src=self._source(stream), tag=self._tag(*stream, mb)), buffer

    def _take(self, kind: str, s: int, mb: int) -> Tensor:
        stream = (kind, s)
        if stream not in self.streams:
            return self.local.pop((kind, s, mb))
        work, buffer = self.posted[stream]
        work.wait()
        self.posted[stream] = self._post(stream)
        return buffer

    def _hand(self, kind: str, s: int, mb: int, value: Tensor) -> None:
        lane = self.lane_of[s]
        if lane == self.rank:
            self.local[kind, s, mb] = value
            return
        self.sends.append((dist.isend(value, dst=lane, tag=self._tag(kind, s, mb)), value))
        if len(self.sends) > self.most_sends:
            self.sends.popleft()[0].wait()
