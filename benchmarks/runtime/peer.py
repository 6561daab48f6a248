"""torch.distributed.pipelining: its stages and schedules, used as in its documentation."""

from __future__ import annotations

from typing import Any

import torch
from tasks import Case, Task, forget, gradients_of
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs

Lane = list[tuple[str, int, int]]

ONE_STAGE = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
MORE_STAGES = {
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "zb_h1": pipelining.ScheduleInterleavedZeroBubble,  # with one stage per lane: ZB1P of the zero-bubble paper
    "zb_v": pipelining.ScheduleZBVZeroBubble,
}
HAS = frozenset(ONE_STAGE) | frozenset(MORE_STAGES)


class Peer:
    """One rank of a pipeline. It runs the order `lanes` if given, and otherwise its own schedule of that name."""

    def __init__(self, case: Case, task: Task, lane_of: list[int], lanes: list[Lane] | None = None) -> None:
        self.rank = torch.distributed.get_rank()
        self.stages = {s: stage for s, stage in enumerate(task.stages) if lane_of[s] == self.rank}
        self.is_first, self.is_last = 0 in self.stages, len(lane_of) - 1 in self.stages
        wrapped = [pipelining.PipelineStage(m, s, len(lane_of), torch.device("cpu")) for s, m in self.stages.items()]
        if lanes is not None:
            self.schedule: Any = _with_order(wrapped, case, task, lanes)
        elif case.schedule in ONE_STAGE:
            self.schedule = ONE_STAGE[case.schedule](wrapped[0], case.micro_batches, loss_fn=task.loss)
        else:
            self.schedule = MORE_STAGES[case.schedule](wrapped, case.micro_batches, loss_fn=task.loss)

    def step(self, batch: Tensor, target: Tensor) -> Tensor | None:
        losses: list[Tensor] | None = [] if self.is_last else None
        inputs = (batch,) if self.is_first else ()
        self.schedule.step(*inputs, target=target if self.is_last else None, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else None

    def order(self) -> list[str] | None:
        """Return all lanes as text if the schedule is a list of actions; None if it is a loop."""
        lanes = getattr(self.schedule, "pipeline_order", None)
        if not isinstance(self.schedule, theirs._PipelineScheduleRuntime) or lanes is None:
            return None
        return [" ".join(str(action) for action in lanes[rank] if action is not None) for rank in sorted(lanes)]

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of(self.stages)

    def forget(self) -> None:
        forget(list(self.stages.values()))

    def close(self) -> None:
        pass


def _with_order(stages: list[Any], case: Case, task: Task, lanes: list[Lane]) -> Any:  # noqa: ANN401
    """Return the peer's runtime with a given order of actions. The part of the peer that reads a list is private."""
    runtime = theirs._PipelineScheduleRuntime(stages, case.micro_batches, loss_fn=task.loss)
    order = {
        rank: [theirs._Action.from_str(f"{s}{kind}{mb}") for kind, s, mb in lane] for rank, lane in enumerate(lanes)
    }
    runtime._prepare_schedule_with_comms(order)
    return runtime
