"""Unfit partition: the error for models that fit no cuts: what each lane lacks, and what would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.errors import PartitionError, PenstockError
from penstock.planning.partition.cut_problem import Problem
from penstock.planning.partition.many_stages_per_lane import lightest, solve_lanes
from penstock.planning.partition.partition_memory import Holding, LaneMemory
from penstock.report.units import show_bytes
from penstock.schedule.keep_policies import POLICIES

_STEPS = 4_000_000  # of the label search, per trial
_MOST_NAMED = 4  # lanes that a message names
_MOST_CUTS = 16


# a change that may make a model fit: its description, and a function that builds the changed problem
Trial = tuple[str, Callable[[], Problem]]


def refuse(problem: Problem, trials: Sequence[Trial]) -> PartitionError:
    """Return the error for a problem without cuts that fit the memory."""
    assert problem.memory is not None
    cuts, is_least = _least_excess(problem)
    over = problem.memory.excess(problem.spans(cuts))
    worst = np.argsort(-over, kind="stable")[: min(_MOST_NAMED, int((over > 0).sum()))]
    lines = [_missing(problem, cuts, lane) for lane in sorted(worst.tolist())]
    lines += [f"{more} more lanes lack less memory"] if (more := int((over > 0).sum()) - len(lines)) else []
    lead = "no cuts fit the memory" if is_least else "no cuts were found that fit the memory"
    found = _first_of_each(trials)
    advice = f"; what would fit: {', or '.join(found)}" if found else "; none of the changes tried would fit"
    at = ", ".join(str(problem.positions[cut]) for cut in cuts[:_MOST_CUTS]) + (", …" if len(cuts) > _MOST_CUTS else "")
    return PartitionError(f"{lead}; with the closest cuts ([{at}]) {'; '.join(lines)}{advice}")


def _missing(problem: Problem, cuts: list[int], lane: int) -> str:
    """Describe how many bytes a lane lacks, and what takes its memory."""
    memory, profile = problem.memory, problem.profile
    assert memory is not None
    spans = [problem.spans(cuts)[s] for s in memory.holdings[lane].stages]
    nodes = [n for a, b in spans for n in range(int(problem.positions[a]), int(problem.positions[b]))]
    weights, grads = profile.weight_bytes(nodes), profile.grad_bytes(nodes)
    held = float(memory.held(lane, spans).max())
    over = weights + (1 + profile.optimizer_bytes) * grads + held - float(memory.limits[lane])
    optimizer = profile.optimizer_bytes * grads
    parts = {"weights": weights, "gradients": grads, "optimizer": optimizer, "saved": held}
    what = ", ".join(f"{name}: {show_bytes(amount)}" for name, amount in parts.items())
    limit = float(memory.limits[lane])
    return f"lane {lane} exceeds its {show_bytes(limit)} by {over:,.0f} bytes ({show_bytes(over)}; {what})"


def _first_of_each(trials: Sequence[Trial]) -> list[str]:
    """Return the descriptions of the trials that fit; of each family only the first."""
    found: dict[str, str] = {}
    for words, build in trials:
        family = words.split(":")[0]
        if family in found:
            continue
        try:
            fits = _can_fit(build())
        except PenstockError:  # too few nodes, or no such schedule
            fits = False
        if fits:
            found[family] = words
    return list(found.values())


def _can_fit(problem: Problem) -> bool:
    if problem.is_chain:
        return problem.chain().fits() is not None
    return solve_lanes(problem, steps=_STEPS) is not None


def _least_excess(problem: Problem) -> tuple[list[int], bool]:
    """Return the cuts that exceed the limits by the fewest bytes, and whether this is proved."""
    memory = problem.memory
    assert memory is not None
    if not problem.is_chain:
        free = solve_lanes(replace(problem, memory=None), steps=0)
        assert free is not None
        return lightest(problem, free[0]), False
    low, best = 0.0, replace(problem, memory=None).chain().fits()
    assert best is not None
    high = float(memory.excess(problem.spans(best)).max())
    while high - low > max(1.0, 1e-3 * high):
        allowed = (low + high) / 2
        cuts = replace(problem, memory=replace(memory, limits=memory.limits + allowed)).chain().fits()
        if cuts is None:
            low = allowed
        else:
            best, high = cuts, min(allowed, float(memory.excess(problem.spans(cuts)).max()))
    return best, True


def smaller(memory: LaneMemory, share: float) -> LaneMemory:
    """Return the memory with a smaller micro-batch: parameters stay, everything else shrinks in proportion."""
    return replace(memory, saved=memory.saved * share, pending=memory.pending * share, kept=memory.kept * share)


def held_by(counts: Sequence[float], lane_of: Sequence[int], keep: str) -> tuple[Holding, ...]:
    """Return what lanes hold, given the number of micro-batches that each stage has in flight."""
    found = []
    for lane in range(1 + max(lane_of)):
        stages = tuple(s for s, home in enumerate(lane_of) if home == lane)
        flight = np.array([counts[s] for s in stages])
        none = np.zeros(len(stages))
        if POLICIES[keep].recomputes:  # the inputs of all stages, and the saved values of one stage at a time
            moments = [np.stack([row, none, flight]) for row in np.eye(len(stages))]
        else:
            moments = [np.stack([flight, none, none])]
        found.append(Holding(stages, np.array(moments)))
    return tuple(found)
