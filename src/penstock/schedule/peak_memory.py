"""Peak memory: the maximum memory of each lane, counted in the order of its actions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.actions import KIND_INDEX, KINDS, Floats, Ints, Kind
from penstock.schedule.flow import Rows
from penstock.schedule.rules import RULES, Value
from penstock.schedule.schedule import Schedule

# Values that occupy memory of a lane until they are freed.
HELD = frozenset({Value.SAVED, Value.PENDING, Value.INPUT})


@dataclass(frozen=True)
class MemoryLimit:
    """Saved and pending bytes of each stage for one micro-batch, and the memory limit of each lane."""

    saved_bytes: Floats
    pending_bytes: Floats
    limit_bytes: Floats  # one per lane
    input_bytes: Floats | None = None  # inputs, which stages that recompute hold instead of saved values


def changes(saved: Floats, pending: Floats, kept_input: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the bytes that each kind (row) adds for each stage (column): at its start, and at its end.

    Saved values count from the start of the action that makes them. Pending values count from the end of the input
    gradient. Stages that recompute hold their input (`kept_input`) instead of the values that their forward saves.
    """
    zeros = np.zeros_like(saved)
    first_saved, kept = (saved, zeros) if kept_input is None else (zeros, kept_input)
    at_start, at_end = np.zeros((len(KINDS), len(saved))), np.zeros((len(KINDS), len(saved)))
    for index, kind in enumerate(KINDS):
        rule = RULES[kind]
        at_start[index] += first_saved * (Value.SAVED in rule.makes) + saved * (Value.SAVED in rule.remakes)
        at_start[index] += kept * (Value.INPUT in rule.makes)
        at_end[index] += pending * (Value.PENDING in rule.makes) - pending * (Value.PENDING in rule.frees)
        at_end[index] -= saved * (Value.SAVED in rule.frees) + kept * (Value.INPUT in rule.frees)
    return at_start, at_end


def changes_of(
    kind: NDArray[np.int8], stage: Ints, mb: Ints, *, saved: Floats, pending: Floats, kept_input: Floats
) -> tuple[Floats, Floats]:
    """Return the bytes that each action adds: at its start, and at its end.

    A stage that recomputes holds its input from forward to backward, and in addition its saved values: from the
    recompute on, or, if the micro-batch is not recomputed, from the forward on.
    """
    recompute = kind == KIND_INDEX[Kind.RECOMPUTE]
    is_recomputed = np.zeros((len(saved), int(mb.max(initial=0)) + 1), dtype=np.bool_)
    is_recomputed[stage[recompute], mb[recompute]] = True
    recomputes = is_recomputed[stage, mb]
    keeps_input = np.where(is_recomputed.any(axis=1), kept_input, 0.0)
    held = changes(saved + keeps_input, pending)
    recomputed = changes(saved, pending, kept_input)
    at_start, at_end = (
        np.where(recomputes, b[kind, stage], a[kind, stage]) for a, b in zip(held, recomputed, strict=True)
    )
    return at_start, at_end


def find_over_limit(schedule: Schedule, rows: Rows, limit: MemoryLimit) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, index, message) for the first action of each lane that exceeds its limit.

    Actions count in the order of the lane, and a copy to host memory counts as done at once. The memory that copies
    hold while they run depends on the host link; `simulate` computes it.
    """
    kept_input = np.zeros(schedule.num_stages) if limit.input_bytes is None else limit.input_bytes
    at_start, at_end = changes_of(
        rows.kind, rows.stage, rows.mb, saved=limit.saved_bytes, pending=limit.pending_bytes, kept_input=kept_input
    )
    for lane in range(schedule.num_lanes):
        here = slice(*rows.starts[lane : lane + 2].tolist())
        starts, ends = at_start[here], at_end[here]
        held = np.cumsum(starts) + np.concatenate([[0.0], np.cumsum(ends)[:-1]]) if len(starts) else starts
        # rounding of long sums: a limit that is met exactly is not exceeded
        over = np.flatnonzero(held > limit.limit_bytes[lane] * (1 + 1e-9))
        if over.size:
            at = int(rows.starts[lane]) + int(over[0])
            facts = f"its peak is {held.max():,.6g}; limit: {limit.limit_bytes[lane]:,.6g}"
            yield lane, rows.index(at), f"{rows.action(at)} brings the lane to {held[over[0]]:,.6g} bytes, {facts}"
