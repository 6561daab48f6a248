"""Several stages per lane: find good cuts by solving windows exactly; prove or improve them by a label search.

See docs/design/partition.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.planning.partition.cut_problem import Problem
from penstock.planning.partition.label_search import LabelSearch, OutOfSteps
from penstock.planning.partition.nested_lanes import solve_nested
from penstock.planning.partition.one_stage_per_lane import SAME, Chain

_STEPS = 30_000_000  # of the label search: about one second
_WINDOW_STEPS = 1_000_000_000  # of the search by windows: about one second
_SWEEPS = 30  # approximate number of sweeps per window
_NEAR = 1e-7  # relative precision of the solution of a window
_MOST_ROUNDS = 200
_MOST_LIGHTER = 12
_TILTS = (0.0, -0.3, 0.3, -0.15, 0.15, -0.5, 0.5, -0.8, 0.8)
_FEW = 20_000  # maximum of stages × positions for which all tilts are tried
_POWER = 16  # a sum of 16th powers is dominated by the maximum, but still depends on the others
_MOST_TRIES = 8
_MOST_SHIFTS = 100
_PLACES = 16  # number of places tried between the neighbours of a cut


@dataclass(eq=False)
class _Steps:
    """The remaining steps, of about one nanosecond each; counted, not timed."""

    left: int

    def spend(self, problem: Problem, cuts: list[int], first: int, last: int) -> bool:
        """Subtract the cost of a window; return whether enough steps were left."""
        bounds = [0, *cuts, len(problem.positions) - 1]
        size = 1_000 + bounds[last + 1] - bounds[first]
        sweeps = _SWEEPS * (last - first + 1)
        if problem.memory is not None:
            sweeps += sum(len(problem.memory.holdings[problem.ways[0][s]].counts) for s in range(first, last + 1))
        self.left -= 10 * sweeps * size
        return self.left >= 0


def solve_lanes(problem: Problem, *, steps: int = _STEPS) -> tuple[list[int], float] | None:
    """Return the best cuts found and a lower bound of the period; None if no cuts were found that fit the memory.

    The search counts steps, not seconds, so the same problem has the same answer on any machine.
    """
    relaxed = _each_stage_alone(problem).solve()
    if relaxed is None:
        return None
    bound = max(relaxed[1], _even(problem))
    best: list[int] | None = None
    left = _Steps(_WINDOW_STEPS)
    starts = _starts(problem, relaxed[0])
    nested = solve_nested(problem)
    if nested is not None:
        bound, starts = max(bound, nested[1]), chain([nested[0]], starts)
    for start in starts:
        cuts = _improve(problem, start, left)
        if cuts is not None and (best is None or problem.period(cuts) < problem.period(best)):
            best = cuts
        if best is not None and (problem.period(best) <= bound * (1 + SAME) or left.left < 0):
            break
    return _prove(problem, best, bound, steps)


def _prove(problem: Problem, best: list[int] | None, bound: float, steps: int) -> tuple[list[int], float] | None:
    """Search all cuts for better ones until the steps are used up."""
    period = np.inf if best is None else problem.period(best)
    try:
        search = LabelSearch(problem, steps)
        if best is None or period > bound * (1 + SAME):
            better = search.best(min(period * (1 - 1e-12), 1e300))
            best = better or best
            if best is None:
                return None
            period = bound = problem.period(best)
        first = search.first(period)
        return first or best, bound
    except OutOfSteps:
        return None if best is None else (best, bound)


def _even(problem: Problem) -> float:
    """Return a lower bound: all work shared evenly by the lanes, plus the minimum that transfers add."""
    extra = 0.0
    if problem.transfers == "waited":
        extra = sum(
            share * float(problem.trip(source, target).min()) * (problem.speeds[source] + problem.speeds[target]) / 2
            for cut in range(problem.num_stages - 1)
            for source, target, share in problem.hops(cut)
        )
    return float((problem.seconds[-1] + extra) / problem.speeds.sum())


def _each_stage_alone(problem: Problem) -> Chain:
    """Return the relaxed problem in which no stage shares its lane; its optimum is a lower bound."""
    shares = [problem.share_of(s) for s in range(problem.num_stages)]
    speed = [min(problem.speeds[lane] / share for lane, share in used.items() if share) for used in shares]
    return Chain(
        seconds=problem.seconds,
        width=problem.width,
        first=0,
        last=len(problem.positions) - 1,
        speed=np.array(speed),
        base=np.zeros(problem.num_stages),
        furthest=problem.furthest(),
    )


def _starts(problem: Problem, relaxed: list[int]) -> Iterator[list[int]]:
    """Yield starting cuts: even shares for the stages of a lane, then more for the first or the last stages."""
    counts = np.zeros(problem.num_lanes)
    for stage in range(problem.num_stages):
        for lane, share in problem.share_of(stage).items():
            counts[lane] += share
    shares = np.array(
        [
            sum(share * problem.speeds[lane] / counts[lane] for lane, share in problem.share_of(s).items())
            for s in range(problem.num_stages)
        ]
    )
    alone = _each_stage_alone(problem)
    tilts = _TILTS if len(problem.positions) * problem.num_stages <= _FEW else _TILTS[:3]
    for tilt in tilts:
        slope = 1 + tilt * np.linspace(-1, 1, problem.num_stages)
        found = replace(alone, speed=shares * slope).solve()
        if found is not None:
            yield found[0]
    yield relaxed


def _improve(problem: Problem, cuts: list[int], left: _Steps) -> list[int] | None:
    """Solve windows of stages on different lanes exactly, with all other cuts fixed, until none improves."""
    if problem.memory is not None:
        cuts = lightest(problem, cuts, left)
        if not problem.fits(cuts):
            return None
    period = problem.period(cuts)
    for _ in range(_MOST_ROUNDS):
        before = period
        for first, last in _windows(problem):
            if not left.spend(problem, cuts, first, last):
                return cuts
            better = _solve_window(problem, cuts, first, last, below=period)
            if better is not None and problem.period(better) < period and problem.fits(better):
                cuts, period = better, problem.period(better)
        cuts = _shift_cuts(problem, _centre(problem, cuts))
        period = problem.period(cuts)
        if period > before * (1 - SAME):
            break
    return cuts


def _windows(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of the longest runs of stages whose lanes are all different, and whose cuts share no wire."""
    num_stages, reached = problem.num_stages, -1
    for first in range(num_stages):
        lanes: set[int] = set()
        wires: set[object] = set()
        last = first - 1
        while last + 1 < num_stages:
            mine = set(problem.share_of(last + 1))
            crossed = set(problem.wires[last]) if last >= first else set()
            if lanes & mine or wires & crossed or len(mine) > 1:
                break
            lanes |= mine
            wires |= crossed
            last += 1
        if last > first and last > reached:
            reached = last
            yield first, last


def _solve_window(problem: Problem, cuts: list[int], first: int, last: int, *, below: float) -> list[int] | None:
    """Return cuts whose cuts within the window are optimal while all others stay fixed; None without improvement."""
    found = _window(problem, cuts, first, last).solve(below=below, near=_NEAR)
    return None if found is None else [*cuts[:first], *found[0], *cuts[last:]]


def _window(problem: Problem, cuts: list[int], first: int, last: int) -> Chain:
    spans, num_positions = problem.spans(cuts), len(problem.positions)
    stages = range(first, last + 1)
    lanes = [problem.ways[0][s] for s in stages]
    waits = problem.transfers == "waited"
    half = np.zeros((problem.num_stages + 1, num_positions))  # half of the trip at the cut before each stage
    if waits:
        half[1:-1] = problem.trips / 2
    load = problem.lane_loads(cuts)
    own = [
        (problem.seconds[spans[s][1]] - problem.seconds[spans[s][0]]) / problem.speeds[lane]
        + half[s, spans[s][0]]
        + (half[s + 1, spans[s][1]] if s + 1 < problem.num_stages else 0.0)
        for s, lane in zip(stages, lanes, strict=True)
    ]
    return Chain(
        seconds=problem.seconds,
        width=problem.width,
        first=spans[first][0],
        last=spans[last][1],
        speed=problem.speeds[lanes],
        base=np.maximum(load[lanes] - np.array(own), 0.0),
        enter=half[first : last + 1] if waits else None,
        leave=half[first + 1 : last + 2] if waits else None,
        floor=_floors(problem, cuts, first, last),
        furthest=_reaches(problem, cuts, first, last),
    )


def _floors(problem: Problem, cuts: list[int], first: int, last: int) -> NDArray[np.float64] | None:
    """[stages, positions] how long the wires of the cuts in a window are busy, including the load of other cuts."""
    if not any(problem.wires[first:last]):
        return None
    taken = dict(zip(problem.wire_names, problem.wire_seconds(cuts).tolist(), strict=True))
    found = np.zeros((last - first + 1, len(problem.positions)))
    for cut in range(first, last):
        for wire, (there, back) in problem.wires[cut].items():
            mine = there * problem.width + back * problem.grad_width
            np.maximum(found[cut - first], taken[wire] - mine[cuts[cut]] + mine, out=found[cut - first])
    return found


def _reaches(problem: Problem, cuts: list[int], first: int, last: int) -> NDArray[np.int64] | None:
    """[stages, positions] the last possible end of a stage of a window, given the other stages of its lane."""
    if problem.memory is None and not problem.forced:
        return None
    spans = problem.spans(cuts)
    within = (spans[first][0], spans[last][1])
    found = np.broadcast_to(problem.until_forced, (last - first + 1, len(problem.positions))).copy()
    if problem.memory is not None:
        for row, stage in enumerate(range(first, last + 1)):
            lane = problem.ways[0][stage]
            others = {s: spans[s] for s in problem.memory.holdings[lane].stages if s != stage}
            np.minimum(found[row], problem.memory.furthest(lane, stage, others, within), out=found[row])
    return found


def _centre(problem: Problem, cuts: list[int]) -> list[int]:
    """Centre the cuts between two stages of one lane: they cost nothing there, and leave room for their neighbours."""
    for cut in range(len(cuts)):
        if problem.hops(cut) or cuts[cut] in problem.forced:
            continue
        bounds = [0, *cuts, len(problem.positions) - 1]
        moved = [*cuts[:cut], (bounds[cut] + bounds[cut + 2]) // 2, *cuts[cut + 1 :]]
        if problem.fits(moved) and problem.period(moved) <= problem.period(cuts):
            cuts = moved
    return cuts


def lightest(problem: Problem, cuts: list[int], left: _Steps | None = None) -> list[int]:
    """Return cuts that exceed the memory limits by as little as windows can achieve."""
    assert problem.memory is not None
    memory = problem.memory
    for _ in range(_MOST_LIGHTER):
        excess = float(memory.excess(problem.spans(cuts)).max())
        lighter = _lighter(problem, cuts, excess, left or _Steps(_WINDOW_STEPS)) if excess else None
        if lighter is None:
            return cuts
        cuts = lighter
    return cuts


def _lighter(problem: Problem, cuts: list[int], excess: float, left: _Steps) -> list[int] | None:
    assert problem.memory is not None
    memory = problem.memory
    for allowed in (0.0, excess / 2, excess * 0.9):
        relaxed = replace(problem, memory=replace(memory, limits=memory.limits + allowed))
        for first, last in _windows(problem):
            if not left.spend(problem, cuts, first, last):
                return None
            inner = _window(relaxed, cuts, first, last).fits()
            if inner is not None:
                trial = [*cuts[:first], *inner, *cuts[last:]]
                if memory.excess(problem.spans(trial)).max() < excess * (1 - SAME):
                    return trial
    return _move_one(problem, cuts)


# ---- moving one cut at a time, also for stages on two lanes


def _shift_cuts(problem: Problem, cuts: list[int]) -> list[int]:
    """Return cuts that no move of a single cut improves; the period never grows."""
    for _ in range(_MOST_SHIFTS):
        before = cuts
        for cut in range(len(cuts)):
            cuts = _shift(problem, cuts, cut)
        if cuts == before:
            break
    return cuts


def _move_one(problem: Problem, cuts: list[int]) -> list[int] | None:
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


def _change(problem: Problem, cut: int, at: int, places: NDArray[np.int64]) -> NDArray[np.float64]:
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
