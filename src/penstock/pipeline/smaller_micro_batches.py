"""Finer: let a pipeline go on with smaller micro-batches, and more of them, when memory has run out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.pipeline import Pipeline

__all__ = ["split_finer"]


def split_finer(pipe: Pipeline) -> bool:
    """Let a pipeline run twice as many micro-batches a step from now on; return whether it can.

    The batch, the cuts, the weights and the lanes stay as they are, so loss and gradients are the same as before. It
    cannot where micro-batches of the last step had one sample, where the schedule is the user's own or made for costs,
    and where it updates weights within the step, which is then another training. Under torchrun all processes call it.
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
