"""Partition: cut a model into stages so that the slowest lane is as fast as possible and all lanes fit in memory.

The objective, the algorithms and their limits are described in docs/design/partition.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import numpy as np

from penstock.errors import PartitionError, PenstockError, UsageError, nearest
from penstock.model.profile import Profile
from penstock.planning.cluster import Cluster
from penstock.planning.memory_limits import Limit, limit_per_lane
from penstock.planning.partition.cut_problem import Problem, Transfers
from penstock.planning.partition.cut_rules import Group, find_places
from penstock.planning.partition.many_stages_per_lane import lightest, solve_lanes
from penstock.planning.partition.one_stage_per_lane import SAME
from penstock.planning.partition.partition_memory import Holding, LaneMemory, ParameterBytes, holdings_of
from penstock.report.units import show_bytes
from penstock.schedule.keep_policies import PLANNED, POLICIES
from penstock.schedule.schedule import Schedule

# Schedules whose lanes wait for each other's transfers in each micro-batch; a test compares this with the simulator.
_WAITS = frozenset({"1f1b", "pipedream", "pipedream_2bw", "v_min"})

_TRIAL_STEPS = 4_000_000  # of the label search, per trial
_MOST_NAMED = 4  # lanes that a message names
_MOST_CUTS = 16

# a change that may make a model fit: its description, and a function that builds the changed problem
Trial = tuple[str, Callable[[], Problem]]


@dataclass(frozen=True)
class Partition:
    """The cuts of a model, and the costs of one micro-batch in the steady state."""

    cuts: tuple[int, ...]  # cut c lies between node c - 1 and node c
    lane_of: tuple[int, ...]  # the lane of each stage (in a bidirectional schedule: on the first way)
    stage_seconds: tuple[float, ...]  # compute time of each stage on its lane
    lane_seconds: tuple[float, ...]  # compute time of each lane
    transfer_seconds: tuple[float, ...]  # round-trip time of each cut: values forward and gradients back
    lane_bytes: tuple[float, ...]  # peak memory of each lane
    period_seconds: float  # time of one micro-batch, which was minimised
    bound_seconds: float  # lower bound of the period

    @property
    def is_proved(self) -> bool:
        """Whether it is proved that no other cuts are better."""
        return self.period_seconds <= self.bound_seconds * (1 + 2 * SAME)

    @property
    def gap(self) -> float:
        """The share by which the best cuts could be better at most; 0 if these are proved to be the best."""
        return 0.0 if self.is_proved else 1 - self.bound_seconds / self.period_seconds


def partition_of(plain: Mapping[str, Any]) -> Partition:
    """Return the partition of a dict made by `dataclasses.asdict`, also after a round trip through JSON."""
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in plain.items()}
    return Partition(**fields)


def partition(
    profile: Profile,
    *,
    schedule: Schedule | None = None,
    lane_of: Sequence[int] | None = None,
    stages: int | None = None,
    cluster: Cluster | None = None,
    memory_limit: Limit | None = None,
    in_flight: float | Sequence[float] | None = None,
    keep: str = "hold",
    transfers: Transfers | None = None,
    cuts_at: Sequence[int | str] = (),
    together: Sequence[Group] = (),
    with_lanes: Callable[[int], Schedule] | None = None,
) -> Partition:
    """Return the cuts with the shortest time per micro-batch in the steady state, within the memory of each lane.

    Pass exactly one of `schedule`, `lane_of` and `stages`.

    Args:
        profile: the costs of each node.
        schedule: defines the lanes of stages, the micro-batches they hold, and whether lanes wait for transfers.
        lane_of: the lane of each stage.
        stages: number of stages, each on its own lane.
        cluster: speeds and links of the lanes.
        memory_limit: bytes of each lane for weights, gradients, optimizer state and saved values.
        in_flight: number of micro-batches that each stage holds, if there is no schedule; by default 1.
        keep: "hold" or "recompute" saved values, or recompute them "except_last": not for the last micro-batch.
        transfers: whether lanes wait for transfers ("waited") or overlap them ("hidden"); the default depends on the
            schedule, and is "waited" without one.
        cuts_at: where cuts must lie: a node number, or the node or module after the cut.
        together: groups of nodes that must be in one stage: numbers, names, or the path of a module.
        with_lanes: builds the schedule for more lanes, to find out whether more lanes would fit if these do not.

    Raises:
        UsageError: if an argument is invalid.
        CostError: if a limit or the cluster does not match the lanes.
        PartitionError: if the requested cuts are impossible or no cuts fit the memory; the message says what is
            missing and what would fit.
    """
    ways, shares, num_lanes = _homes(schedule, lane_of, stages)
    _check(profile, schedule, in_flight=in_flight, keep=keep, transfers=transfers, num_stages=len(ways[0]))
    places = find_places(profile.graph, len(ways[0]), cuts_at, together)
    flights = _flights(in_flight, len(ways[0]))

    def holdings(how: str) -> tuple[Holding, ...]:
        return _held_by(flights, ways[0], how) if schedule is None else holdings_of(schedule, how)

    limits = np.array(limit_per_lane(memory_limit, num_lanes))
    memory = LaneMemory(
        limits=limits,
        holdings=holdings(keep),
        saved=_running(profile.saved_bytes, places.positions),
        pending=_running(profile.pending_bytes, places.positions),
        kept=profile.crossing_bytes[places.positions],
        parameters=ParameterBytes.of(profile, places.positions),
    )
    default: Transfers = "waited" if schedule is None or schedule.name in _WAITS else "hidden"
    problem = Problem(
        profile=profile,
        positions=places.positions,
        forced=places.forced,
        ways=ways,
        shares=shares,
        num_lanes=num_lanes,
        cluster=cluster or Cluster(),
        transfers=transfers or default,
        keep=keep,
        memory=memory if np.isfinite(limits).any() else None,
    )
    found = problem.chain().solve() if problem.is_chain else solve_lanes(problem)
    if found is None:
        more = _more_lanes(problem, places_for=(cuts_at, together), with_lanes=with_lanes, flights=flights)
        raise _refuse(problem, [*more, *_lighter(problem, holdings)])
    return _answer(problem, memory, *found)


def _answer(problem: Problem, memory: LaneMemory, cuts: list[int], bound: float) -> Partition:
    return Partition(
        cuts=tuple(int(problem.positions[cut]) for cut in cuts),
        lane_of=problem.ways[0],
        stage_seconds=tuple(problem.stage_seconds(cuts).tolist()),
        lane_seconds=tuple(problem.lane_seconds(cuts).tolist()),
        transfer_seconds=tuple(float(problem.trips[cut, at]) for cut, at in enumerate(cuts)),
        lane_bytes=tuple(memory.lane_bytes(problem.spans(cuts))),
        period_seconds=problem.period(cuts),
        bound_seconds=bound,
    )


def _homes(
    schedule: Schedule | None, lane_of: Sequence[int] | None, stages: int | None
) -> tuple[tuple[tuple[int, ...], ...], tuple[float, ...], int]:
    """Return the lane of each stage per way, the share of micro-batches per way, and the number of lanes."""
    if sum(given is not None for given in (schedule, lane_of, stages)) != 1:
        raise UsageError("pass exactly one of schedule, lane_of and stages")
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            raise UsageError(f"schedule: pass a penstock.schedules.Schedule; given: {type(schedule).__name__}")
        shares = np.bincount(schedule.way_of, minlength=len(schedule.ways)) / schedule.num_mbs
        return schedule.ways, tuple(shares.tolist()), schedule.num_lanes
    if stages is not None:
        if isinstance(stages, bool) or not isinstance(stages, (int, np.integer)) or stages < 1:
            raise UsageError(f"stages: {stages!r} is not a whole number of at least 1")
        lane_of = range(int(stages))
    try:
        homes = tuple(int(lane) for lane in lane_of or ())
    except (TypeError, ValueError):
        raise UsageError(f"lane_of: {lane_of!r} is not a list of lane numbers, one per stage") from None
    if not homes or set(homes) != set(range(1 + max(homes))):
        raise UsageError(f"lane_of: lanes must be numbered from 0, and each needs a stage; given: {list(homes)}")
    return (homes,), (1.0,), 1 + max(homes)


def _check(
    profile: Profile,
    schedule: Schedule | None,
    *,
    in_flight: float | Sequence[float] | None,
    keep: str,
    transfers: str | None,
    num_stages: int,
) -> None:
    faults = []
    if not isinstance(profile, Profile):
        faults.append(f"profile: pass a penstock Profile; given: {type(profile).__name__}")
    if keep not in PLANNED:
        faults.append(f"keep: {keep!r} is not one of {', '.join(PLANNED)}.{nearest(str(keep), PLANNED)}")
    if transfers is not None and transfers not in get_args(Transfers):
        hint = nearest(str(transfers), get_args(Transfers))
        faults.append(f"transfers: {transfers!r} is not one of {', '.join(get_args(Transfers))}.{hint}")
    if in_flight is not None:
        if schedule is not None:
            faults.append("in_flight: the schedule determines how many micro-batches are in flight; leave it out")
        given = np.asarray(in_flight, dtype=object)
        if given.ndim > 1 or (given.ndim == 1 and len(given) != num_stages):
            faults.append(f"in_flight: pass one number, or one per stage; stages: {num_stages}")
        elif not all(isinstance(n, (int, float, np.number)) and 0 <= n < np.inf for n in given.ravel()):
            faults.append(f"in_flight: {in_flight!r} must be finite numbers, 0 or more")
    if faults:
        raise UsageError("; ".join(faults))


def _flights(in_flight: float | Sequence[float] | None, num_stages: int) -> list[float]:
    given = np.asarray(1.0 if in_flight is None else in_flight, dtype=np.float64)
    return list(np.broadcast_to(given, num_stages).tolist())


def _running(column: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.asarray(np.concatenate([[0.0], np.cumsum(column)])[positions])


def _smaller(memory: LaneMemory, share: float) -> LaneMemory:
    """Return the memory with a smaller micro-batch: parameters stay, everything else shrinks in proportion."""
    return replace(memory, saved=memory.saved * share, pending=memory.pending * share, kept=memory.kept * share)


def _held_by(counts: Sequence[float], lane_of: Sequence[int], keep: str) -> tuple[Holding, ...]:
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


# ---- unfit models: what each lane lacks, and what would fit


def _refuse(problem: Problem, trials: Sequence[Trial]) -> PartitionError:
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
    return solve_lanes(problem, steps=_TRIAL_STEPS) is not None


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


def _lighter(problem: Problem, holdings: Callable[[str], tuple[Holding, ...]]) -> list[Trial]:
    """Return trials that reduce the memory of stages: recompute and smaller micro-batches."""
    memory = problem.memory
    assert memory is not None

    def recomputing() -> Problem:
        return replace(problem, keep="recompute", memory=replace(memory, holdings=holdings("recompute")))

    trials: list[Trial] = [('keep="recompute"', recomputing)] if problem.keep == "hold" else []
    batch = problem.profile.batch_size
    for size in (batch // part for part in (2, 4, 8) if batch >= part):
        words = f"a smaller micro-batch: {size} instead of {batch} samples"
        trials.append((words, partial(replace, problem, memory=_smaller(memory, size / batch))))
    return trials


def _more_lanes(
    problem: Problem,
    *,
    places_for: tuple[Sequence[int | str], Sequence[Group]],
    with_lanes: Callable[[int], Schedule] | None,
    flights: list[float],
) -> list[Trial]:
    """Return trials with more lanes, up to four times as many; each new lane has the smallest memory limit."""
    now = problem.num_lanes
    counts = sorted({now + 1, now + 2, -(-now * 3 // 2), 2 * now, 3 * now, 4 * now})

    def build(lanes: int) -> Problem:
        memory = problem.memory
        assert memory is not None
        limits = np.concatenate([memory.limits, np.full(lanes - now, memory.limits.min())])
        if with_lanes is None:
            ways, shares, _ = _homes(None, None, lanes)
            held = _held_by([max(flights)] * lanes, ways[0], problem.keep)
        else:
            schedule = with_lanes(lanes)
            ways, shares, _ = _homes(schedule, None, None)
            held = holdings_of(schedule, problem.keep)
        places = find_places(problem.profile.graph, len(ways[0]), *places_for)
        return replace(
            problem,
            positions=places.positions,
            forced=places.forced,
            ways=ways,
            shares=shares,
            num_lanes=lanes,
            cluster=Cluster(),  # only memory is tried: speeds do not matter
            memory=replace(memory, limits=limits, holdings=held),
        )

    is_known = with_lanes is not None or (len(problem.ways) == 1 and problem.num_stages == now)
    return [(f"more lanes: {lanes}", partial(build, lanes)) for lanes in counts] if is_known else []
