"""Cut shifting: move one cut at a time to balance lanes and wires; also for stages on two lanes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.planning.partition.cut_problem import Problem
from penstock.planning.partition.one_stage_per_lane import SAME

Floats = NDArray[np.float64]

_POWER = 16  # a sum of 16th powers is dominated by the maximum, but still depends on the others
_MOST_TRIES = 8
_MOST_ROUNDS = 100
_PLACES = 16  # number of places tried between the neighbours of a cut


def shift_cuts(problem: Problem, cuts: list[int]) -> list[int]:
    """Return cuts that no move of a single cut improves; the period never grows."""
    for _ in range(_MOST_ROUNDS):
        before = cuts
        for cut in range(len(cuts)):
            cuts = _shift(problem, cuts, cut)
        if cuts == before:
            break
    return cuts


def lighten(problem: Problem, cuts: list[int]) -> list[int] | None:
    """Return cuts that exceed the memory limits by less, with one cut moved; None if no tried place is better."""
    memory = problem.memory
    assert memory is not None
    least, best = float(memory.excess(problem.spans(cuts)).sum()), None
    bounds = [0, *cuts, len(problem.positions) - 1]
    for cut in range(len(cuts)):
        if cuts[cut] in problem.forced:
            continue
        near = range(max(bounds[cut] + 1, cuts[cut] - 2), min(bounds[cut + 2], cuts[cut] + 3))
        far = np.linspace(bounds[cut] + 1, bounds[cut + 2] - 1, _PLACES).astype(int).tolist()
        for place in sorted({*near, *far}):
            trial = [*cuts[:cut], place, *cuts[cut + 1 :]]
            excess = float(memory.excess(problem.spans(trial)).sum())
            if excess < least * (1 - SAME):
                least, best = excess, trial
    return best


def _shift(problem: Problem, cuts: list[int], cut: int) -> list[int]:
    bounds = [0, *cuts, len(problem.positions) - 1]
    if cuts[cut] in problem.forced:
        return cuts
    places = np.arange(bounds[cut] + 1, bounds[cut + 2])
    loads = np.concatenate([problem.lane_loads(cuts), problem.wire_seconds(cuts)])
    moved = loads + _change(problem, cut, cuts[cut], places)
    scale = max(float(loads.max()), 1e-300)
    uneven = ((np.maximum(moved, 0.0) / scale) ** _POWER).sum(axis=1)
    now = float(uneven[cuts[cut] - int(places[0])])
    for pick in np.argsort(uneven, kind="stable")[:_MOST_TRIES].tolist():
        trial = [*cuts[:cut], int(places[pick]), *cuts[cut + 1 :]]
        if uneven[pick] >= now * (1 - 1e-9):
            break
        if problem.period(trial) <= problem.period(cuts) and problem.fits(trial):
            return trial
    return cuts


def _change(problem: Problem, cut: int, at: int, places: NDArray[np.int64]) -> Floats:
    """[places, lanes and wires] the load that moving a cut adds to each lane and wire."""
    change = np.zeros((len(places), problem.num_lanes + len(problem.wire_names)))
    work = problem.seconds[places] - problem.seconds[at]
    for stage, sign in ((cut, 1), (cut + 1, -1)):
        for lane, share in problem.share_of(stage).items():
            change[:, lane] += sign * share * work / problem.speeds[lane]
    if problem.transfers == "waited":
        for source, target, share in problem.hops(cut):
            trip = problem.trip(source, target)
            change[:, [source, target]] += (share * (trip[places] - trip[at]) / 2)[:, None]
    for wire, (there, back) in problem.wires[cut].items():
        column = problem.num_lanes + problem.wire_names.index(wire)
        change[:, column] += there * (problem.width[places] - problem.width[at])
        change[:, column] += back * (problem.grad_width[places] - problem.grad_width[at])
    return change
