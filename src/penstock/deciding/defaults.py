"""Defaults: the default of each decision. They are defined only here."""

from __future__ import annotations

from typing import Literal

LANES = 2  # for a pipeline with at most one GPU and one process
MICRO_BATCHES_PER_LANE = 4
KEEP: Literal["hold"] = "hold"
SCHEDULE = "1f1b"
# for lanes that need not exist: `penstock simulate`, `penstock profile` and `penstock.explain`
EXPLORED_LANES, EXPLORED_MICRO_BATCHES = 4, 8


def default_micro_batches(lanes: int, batch_size: int | None = None) -> int:
    """Return the number of micro-batches of a step: four per lane, but at most the number of samples.

    >>> default_micro_batches(2), default_micro_batches(2, batch_size=5)
    (8, 5)
    """
    wanted = MICRO_BATCHES_PER_LANE * lanes
    return wanted if batch_size is None else min(wanted, batch_size)


def default_schedule(loss_over: str) -> str:
    """Return the default schedule; for a loss over the whole batch, one that runs all forwards first."""
    return "zb_gpipe" if loss_over == "batch" else SCHEDULE
