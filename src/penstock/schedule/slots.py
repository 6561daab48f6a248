"""Slots: number the buffers of values, so that a runtime can allocate each buffer once and reuse it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from penstock.schedule.actions import KINDS, Ints, Kind
from penstock.schedule.flow import NONE, Rows
from penstock.schedule.peak_memory import HELD
from penstock.schedule.rules import RULES, At, Rule, Value

Pool = tuple[int, int, Value, int]  # lane, stage, value, and for a received value its source stage (else -1)

_HELD = HELD - {Value.INPUT}  # an input stays in the slot that received it


@dataclass(frozen=True)
class Slots:
    """The slot of the value that each action leaves in a buffer (-1: none), and the number of slots per pool."""

    of: Ints
    counts: dict[Pool, int]


def assign_slots(rows: Rows) -> Slots:
    """Give each value the lowest free slot of its pool; rows must come from `lower`."""
    of = np.full(len(rows), NONE, dtype=np.int32)
    counts: dict[Pool, int] = defaultdict(int)
    free: dict[Pool, list[int]] = defaultdict(list)
    held: dict[tuple[int, int, Value, int], list[tuple[Pool, int]]] = defaultdict(list)  # by lane, stage, value, mb
    recomputed = {(s, m) for s, m in zip(*_places(rows, Kind.RECOMPUTE), strict=True)}
    columns = zip(
        rows.kind.tolist(), rows.stage.tolist(), rows.mb.tolist(), rows.lane.tolist(), rows.peer.tolist(), strict=True
    )
    for at, (kind, stage, mb, lane, peer) in enumerate(columns):
        rule = RULES[KINDS[kind]]
        for value in _allocated(rule):
            if value is Value.SAVED and value in rule.makes and (stage, mb) in recomputed:
                continue  # dropped at once: the recompute makes it again
            pool = (lane, stage, value, peer)
            slot = heapq.heappop(free[pool]) if free[pool] else counts[pool]
            counts[pool] = max(counts[pool], slot + 1)
            held[lane, stage, value, mb].append((pool, slot))
            of[at] = slot
        for value in _released(rule, recomputes=(stage, mb) in recomputed):
            for pool, slot in held.pop((lane, stage, value, mb), ()):
                heapq.heappush(free[pool], slot)
    return Slots(of, dict(counts))


def _allocated(rule: Rule) -> tuple[Value, ...]:
    return tuple(v for v in rule.makes if v in _HELD) + rule.remakes


def _released(rule: Rule, *, recomputes: bool) -> tuple[Value, ...]:
    """Return the values whose slots an action releases.

    The action that uses a received value releases it. A stage that recomputes keeps its input longer.
    """
    used_up = tuple(need.value for need in rule.needs if need.at in (At.BEFORE, At.AFTER))
    if recomputes:
        kept = (Value.ACTIVATION,) if Value.INPUT in rule.frees else ()
        used_up = tuple(value for value in used_up if value is not Value.ACTIVATION) + kept
    return used_up + tuple(v for v in rule.frees if v in _HELD)


def _places(rows: Rows, kind: Kind) -> tuple[list[int], list[int]]:
    at = rows.where(kind)
    return rows.stage[at].tolist(), rows.mb[at].tolist()
