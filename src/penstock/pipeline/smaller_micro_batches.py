"""Smaller micro-batches: lets a pipeline continue with more and smaller micro-batches after memory ran out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline


def split_finer(pipe: Pipeline) -> bool:
    """Double the number of micro-batches per step of a pipeline; return False if this is impossible.

    The batch, the cuts, the weights and the lanes do not change, so the loss and the gradients stay the same. It is
    impossible in these cases:

    - The micro-batches of the last step had one sample each, or there was only one micro-batch.
    - The schedule is the user's own, was made for costs, or cannot be built for the new number.
    - A function of the user splits the batches.
    - The schedule updates weights within the step: with smaller micro-batches, the training would be a different one.

    Under torchrun, all processes must call this function.
    """
    before, last = pipe.schedule, pipe._steps.past.last
    if last is not None and max(last.sizes, default=1) == 1:
        return False
    finer = None if before.versions is not None else pipe._planned.smaller_micro_batches()
    if finer is None or finer.plan.schedule.ways != before.ways:
        return False
    pipe._planned, pipe.schedule = finer, finer.plan.schedule
    steps = pipe._steps
    steps.setup = replace(steps.setup, schedule=pipe.schedule)
    steps.graphs = steps.graphs.for_setup(steps.setup)
    steps.reader = steps.reader.with_micro_batches(pipe.schedule.num_mbs)
    return True
