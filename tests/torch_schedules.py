"""torch.distributed.pipelining's own schedules, built without processes: stages that only know their numbers."""

from __future__ import annotations

from unittest.mock import MagicMock

from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase


class NumberedStage(_PipelineStageBase):
    """A stage that has a place in the pipeline and nothing else."""

    def __init__(self, index, *, num_stages, lanes, lane):
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = lanes, lane
        self.group, self.submod, self.device = MagicMock(), None, None
        self.has_backward = True

    def _create_grad_recv_info(self, *args, **kwargs):
        return None

    def _prepare_backward_infra(self, *args, **kwargs):
        return None

    def _prepare_forward_infra(self, *args, **kwargs):
        return None


def make(kind, *, lanes, micro_batches, stages_of=None, lane=0):
    """Return one of torch's schedules as lane 0 would hold it."""
    stages_of = stages_of or (lambda lane: [lane])
    own = stages_of(lane)
    num_stages = lanes * len(own)
    stages = [NumberedStage(s, num_stages=num_stages, lanes=lanes, lane=lane) for s in own]
    return getattr(theirs, kind)(stages, micro_batches)


def loop(lanes, per_lane):
    return lambda lane: [lane + lanes * k for k in range(per_lane)]


def fold(lanes):
    return lambda lane: [lane, 2 * lanes - 1 - lane]


def runtime(schedule, path):
    """Load a CSV into torch's runtime, which checks it and adds its transfers; return that."""
    stages_of = schedule.stages_of(0)
    stages = [NumberedStage(s, num_stages=schedule.num_stages, lanes=schedule.num_lanes, lane=0) for s in stages_of]
    loaded = theirs._PipelineScheduleRuntime(stages, schedule.num_mbs)
    loaded._load_csv(str(path), format="compute_only")
    return loaded
