"""The floor in threads: the loop of floor.py with one thread and one queue per lane. No library, no checks."""

from __future__ import annotations

import queue
import threading

import torch
from floor import Floor, Lane, Stream
from tasks import Task, forget, gradients_of
from torch import Tensor

Box = queue.SimpleQueue[tuple[tuple[str, int, int], Tensor]]


class _LaneOfThread(Floor):
    """One lane. It takes values from its own queue and puts values into the queues of others."""

    def __init__(self, task: Task, lanes: list[Lane], lane_of: list[int], micro_batches: int, **where: object) -> None:
        self.boxes: list[Box] = where["boxes"]
        super().__init__(task, lanes, lane_of, micro_batches, rank=where["rank"])
        self.streams, self.here = {}, {}

    def _source(self, stream: Stream) -> int | None:  # noqa: ARG002 - threads post no receives
        return None

    def _take(self, kind: str, s: int, mb: int) -> Tensor:
        key = (kind, s, mb)
        if key in self.local:
            return self.local.pop(key)
        while key not in self.here:
            found, value = self.boxes[self.rank].get()
            self.here[found] = value
        return self.here.pop(key)

    def _hand(self, kind: str, s: int, mb: int, value: Tensor) -> None:
        lane = self.lane_of[s]
        if lane == self.rank:
            self.local[kind, s, mb] = value
        else:
            self.boxes[lane].put(((kind, s, mb), value))


class FloorOfThreads:
    """All lanes."""

    def __init__(self, task: Task, lanes: list[Lane], lane_of: list[int], micro_batches: int) -> None:
        boxes: list[Box] = [queue.SimpleQueue() for _ in lanes]
        self.stages = task.stages
        self.lanes = [
            _LaneOfThread(task, lanes, lane_of, micro_batches, rank=rank, boxes=boxes) for rank in range(len(lanes))
        ]
        self.tasks: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in lanes]
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        for lane, tasks in zip(self.lanes, self.tasks, strict=True):
            threading.Thread(target=self._work, args=(lane, tasks), daemon=True).start()

    def _work(self, lane: Floor, tasks: queue.SimpleQueue) -> None:
        torch.set_num_threads(1)
        while (given := tasks.get()) is not None:
            self.done.put(lane.step(*given))

    def step(self, batch: Tensor, target: Tensor) -> Tensor:
        for tasks in self.tasks:
            tasks.put((batch, target))
        return next(total for total in [self.done.get() for _ in self.lanes] if total is not None)

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(dict(enumerate(self.stages)))

    def forget(self) -> None:
        forget(self.stages)

    def close(self) -> None:
        for tasks in self.tasks:
            tasks.put(None)
