"""Defaults: what is chosen where the user does not say. Every default of a decision is here, and nowhere else."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "EXPLORED_LANES",
    "EXPLORED_MICRO_BATCHES",
    "KEEP",
    "LANES",
    "default_micro_batches",
    "default_schedule",
]

LANES = 2  # of a pipeline, where there is no more than one GPU and one process
MICRO_BATCHES_PER_LANE = 4
KEEP: Literal["hold"] = "hold"
# of a question about lanes that need not be here: `penstock simulate`, `penstock profile`, `penstock.explain`
EXPLORED_LANES, EXPLORED_MICRO_BATCHES = 4, 8


def default_micro_batches(lanes: int, batch_size: int | None = None) -> int:
    """Return the micro-batches of a step: four per lane, but not more than the batch has samples.

    >>> default_micro_batches(2), default_micro_batches(2, batch_size=5)
    (8, 5)
    """
    wanted = MICRO_BATCHES_PER_LANE * lanes
    return wanted if batch_size is None else min(wanted, batch_size)


def default_schedule(loss_over: str) -> str:
    """Return the schedule: 1f1b; for a loss over the whole batch one whose forwards all come first."""
    return "zb_gpipe" if loss_over == "batch" else "1f1b"
