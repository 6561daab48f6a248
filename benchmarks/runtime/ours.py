"""Penstock: the unchanged stage modules, in threads or in the existing processes."""

from __future__ import annotations

import statistics
import time

import torch
from tasks import Case, Task
from torch import Tensor

import penstock


class Ours:
    """A pipeline of the stages of a case: all lanes in a single process, or the lane of this process."""

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
    """Return the seconds to send a value from one process to the next; lanes 0 and 1 exchange one."""
    if pipe.lanes[0] > 1:
        return 0.0
    value, times = torch.zeros(task.boundary), []
    for number in range(rounds):
        begin = time.perf_counter()
        pipe.internals.group.values.exchange((1 << 30) + number, [value], (0, 1))
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def runtime_seconds(ours: Ours, task: Task, rounds: int = 15) -> float:
    """Return the seconds that the runtime adds to an action, from a step of stages with almost no work.

    The time that these stages themselves take is predicted from a profile and subtracted.
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
    """Return the step time predicted from a profile of the stages and the costs of a hand-over and of the runtime.

    The prediction excludes the loss, because it belongs to no stage.
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
