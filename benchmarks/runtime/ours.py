"""Penstock itself: the stage modules as they are, in threads or in the processes that are there."""

from __future__ import annotations

import statistics
import time

import torch
from tasks import Case, Task
from torch import Tensor

import penstock


class Ours:
    """A pipeline of a case's stages; all of it in one process, this process's lane otherwise."""

    def __init__(self, case: Case, task: Task, *, transport: str = "auto", is_recorded: bool = False) -> None:
        self.case = case
        self.pipe = penstock.Pipeline(
            task.stages,
            example=task.batch,
            loss=task.loss,
            micro_batches=case.micro_batches,
            schedule=penstock.schedules.build(
                case.schedule,
                lanes=case.lanes,
                micro_batches=case.micro_batches,
                stages_per_lane=case.stages_per_lane if case.stages_per_lane > 1 else None,
            ),
            devices=["cpu"] * case.lanes,
            transport=transport,
        )
        self.is_recorded = is_recorded

    def step(self, batch: Tensor, target: Tensor) -> Tensor:
        if not self.is_recorded:
            return self.pipe.step(batch, target)
        with self.pipe.record():
            return self.pipe.step(batch, target)

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.pipe.named_parameters() if p.grad is not None}

    def forget(self) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = None

    def close(self) -> None:
        self.pipe.close()


def hand_over_seconds(pipe: penstock.Pipeline, task: Task, rounds: int = 30) -> float:
    """Return what a value between stages takes from one process to the next: lanes 0 and 1 hand each other one."""
    if pipe.lanes[0] > 1:
        return 0.0
    value, times = torch.zeros(task.boundary), []
    for number in range(rounds):
        begin = time.perf_counter()
        pipe._lane_group.exchange((1 << 30) + number, [value], (0, 1))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def runtime_seconds(ours: Ours, task: Task, rounds: int = 15) -> float:
    """Return what the runtime adds to an action: of a step of stages with next to nothing to do, a share an action.

    What those stages do take is a profile's, and is not counted.
    """
    case, times = ours.case, []
    for _ in range(rounds):
        begin = time.perf_counter()
        ours.step(task.batch, task.target)
        times.append(time.perf_counter() - begin)
    slots = penstock.simulate(
        ours.pipe.schedule, penstock.Costs(forward=0.0), cluster=penstock.Cluster(action_seconds=1.0)
    )
    over = statistics.median(times) - predict(case, task, 0.0, 0.0)
    return max(0.0, over / slots.step_seconds)


def predict(case: Case, task: Task, latency_seconds: float, action_seconds: float) -> float:
    """Return the step that is predicted from a profile of the stages, of a hand-over and of the runtime.

    The loss, which no stage has, is not in it.
    """
    link = penstock.Link(latency_seconds=latency_seconds)
    found = penstock.explain(
        task.stages,
        task.batch[: len(task.batch) // case.micro_batches],
        lanes=case.lanes,
        micro_batches=case.micro_batches,
        schedule=case.schedule,
        stages_per_lane=case.stages_per_lane if case.stages_per_lane > 1 else None,
        cluster=penstock.Cluster(link=link, action_seconds=action_seconds),
    )
    return found.timeline.step_seconds
