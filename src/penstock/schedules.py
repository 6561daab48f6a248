"""penstock.schedules: build, verify, lower, load and register schedules, as pure data; no device needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from penstock.catalog import CATALOG
from penstock.errors import CostError, ScheduleError
from penstock.model.costs import Costs
from penstock.planning.memory_limits import Limit, limit_per_lane, sized
from penstock.planning.search.exact import Proof, check_size, solve_exactly
from penstock.planning.search.greedy import Draft, Problem
from penstock.planning.search.search import search, synthesize
from penstock.planning.simulate import simulate
from penstock.schedule.actions import Action, Kind, Lane
from penstock.schedule.builders.ticks import from_ticks
from penstock.schedule.keep_policies import Keep
from penstock.schedule.lower import Channels, Lowered, lower
from penstock.schedule.peak_memory import MemoryLimit
from penstock.schedule.registry import Builder, Entry, Registry
from penstock.schedule.schedule import Schedule
from penstock.schedule.text_format import load_csv
from penstock.schedule.verify import Fault
from penstock.schedule.verify import find_faults as _find_faults
from penstock.schedule.verify import verify as _verify

__all__ = [
    "Action",
    "Fault",
    "Keep",
    "Kind",
    "Lane",
    "Lowered",
    "Proof",
    "Schedule",
    "build",
    "describe",
    "find_faults",
    "from_ticks",
    "load_csv",
    "lower",
    "names",
    "prove",
    "register",
    "verify",
]


def build(
    name: str,
    *,
    lanes: int,
    micro_batches: int,
    stages_per_lane: int | None = None,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    **options: Any,  # noqa: ANN401 - each builder checks its own
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of `names()`; case and dashes do not matter. The names of torch also work.
        lanes: number of lanes.
        micro_batches: number of micro-batches per step.
        stages_per_lane: number of stages per lane, for schedules that leave it open.
        costs: costs of stages, for schedules that are made by search; others do not need them.
        memory_limit: limit in bytes for the saved and pending values of each lane. `auto` respects it; any other
            schedule is refused if it exceeds the limit. Needs `saved_bytes` in the costs.
        options: further options of a schedule; see `describe(name)`.

    Raises:
        ScheduleError: if the name is unknown, a number is invalid, or the limit is exceeded.

    >>> print(build("1f1b", lanes=2, micro_batches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    entry = _REGISTRY.entry(name)
    if costs is not None and not isinstance(costs, Costs):
        raise CostError(f"costs: pass a penstock.Costs; given: {type(costs).__name__}")
    if memory_limit is not None and (costs is None or costs.saved_bytes is None):
        raise CostError(_NEEDS_BYTES)
    given = {"stages_per_lane": stages_per_lane, **options}
    if "costs" in entry.options:
        given["costs"] = costs
    if "memory_limit" in entry.options:
        given["memory_limit"] = memory_limit
    schedule = _REGISTRY.build(name, lanes=lanes, micro_batches=micro_batches, options=given)
    if costs is not None:
        costs.for_stages(schedule.num_stages)  # raises if the number of stages differs
    if memory_limit is not None and "memory_limit" not in entry.options:
        verify(schedule, costs=costs, memory_limit=memory_limit)
    return schedule


def names() -> tuple[str, ...]:
    """Return the names of all schedules.

    >>> "zb_h1" in names()
    True
    """
    return _REGISTRY.names()


def describe(name: str) -> Entry:
    """Return the description of a schedule: its summary, its paper and its options.

    >>> describe("gpipe").paper
    'Huang et al. 2019'
    """
    return _REGISTRY.entry(name)


def register(name: str, builder: Builder, *, summary: str = "", paper: str = "") -> None:
    """Add a schedule of your own: a function of lanes= and micro_batches= that returns a `Schedule`.

    >>> def one_by_one(*, lanes: int, micro_batches: int) -> Schedule:
    ...     return Schedule.of([[f"{s}{k}{m}" for m in range(micro_batches) for k in "FB"] for s in range(lanes)])
    >>> register("one_by_one", one_by_one, summary="one micro-batch at a time")
    >>> verify(build("one-by-one", lanes=3, micro_batches=2))
    """
    _REGISTRY.register(Entry(name, builder, summary or (builder.__doc__ or "").strip().split("\n")[0], paper))


def verify(
    schedule: Schedule | Lowered,
    *,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    channels: Channels | None = None,
    skips: Iterable[Sequence[int]] = (),
) -> None:
    """Verify that a schedule can run; if not, raise an error with all faults and the lanes around the first one.

    Args:
        schedule: a schedule or a lowered schedule.
        costs: costs with bytes, for the memory limit; without costs, one micro-batch of one stage counts as 1.
        memory_limit: limit of each lane: one number, or one per lane.
        channels: how the transport matches receives to sends: "tagged", "ordered" or "blocking". The default is the
            choice made when lowering, or "tagged".
        skips: pairs (from stage, to stage) for the values that skip stages.

    Raises:
        VerifyError: if the schedule cannot run; the attribute `faults` has all faults.
    """
    memory = _memory(schedule, costs, memory_limit)
    _verify(schedule, memory=memory, channels=channels, skips=skips)


def find_faults(
    schedule: Schedule | Lowered,
    *,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    channels: Channels | None = None,
    skips: Iterable[Sequence[int]] = (),
) -> list[Fault]:
    """Return all faults of a schedule as a list; the arguments are those of `verify`.

    >>> [str(fault) for fault in find_faults(Schedule.of(["0F0 0F0 0B0"]))]
    ['repeated: lane 0, action 1: 0F0 is repeated; the first is on lane 0, action 0']
    """
    return _find_faults(schedule, memory=_memory(schedule, costs, memory_limit), channels=channels, skips=skips)


def _memory(schedule: Schedule | Lowered, costs: Costs | None, memory_limit: Limit | None) -> MemoryLimit | None:
    plan = schedule.schedule if isinstance(schedule, Lowered) else schedule
    if memory_limit is None:
        return None
    if costs is not None and costs.saved_bytes is None:
        raise CostError(_NEEDS_BYTES)
    held = (costs or Costs(saved_bytes=1.0, pending_bytes=0.0)).for_stages(plan.num_stages)
    limits = np.array(limit_per_lane(memory_limit, plan.num_lanes))
    return MemoryLimit(held.saved_bytes, held.pending_bytes, limits, held.input_bytes)


_NEEDS_BYTES = "memory_limit is in bytes, so costs need bytes too: pass Costs(saved_bytes=...)"


def prove(
    *,
    lanes: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    stages_per_lane: int | None = None,
    time_limit_seconds: float = 60.0,
) -> Proof:
    """Solve a small case exactly, to find out how close the search of `auto` comes to the optimum.

    The solver starts from the schedule that `auto` finds with each stage on one lane (`two_ways=False`), and keeps
    its placement of stages. The proof has the better of the two schedules, and a lower bound for all schedules with
    this placement. It needs OR-Tools, which the extra `exact` installs.

    Raises:
        SolverError: if OR-Tools is missing or the case is too large.
    """
    check_size(3 * lanes * micro_batches * (stages_per_lane or _stages_in(costs, lanes)))
    found = build(
        "auto",
        lanes=lanes,
        micro_batches=micro_batches,
        costs=costs,
        memory_limit=memory_limit,
        stages_per_lane=stages_per_lane,
        two_ways=False,
    )
    limits = limit_per_lane(memory_limit, lanes)
    splits = Kind.I in found.kinds
    problem = Problem("exact", found.lane_of, micro_batches, sized(costs, found.num_stages), limits, splits)
    timeline = simulate(found, costs)
    hint: Draft | None = Draft(found, timeline.step_seconds, max(timeline.lane_seconds))
    if found.overlaps or {Kind.B, Kind.I} <= found.kinds:  # the solver does not support these
        hint = search(problem, objective="step")
    return solve_exactly(problem, hint=hint, time_limit_seconds=time_limit_seconds)


def _auto(
    *,
    lanes: int,
    micro_batches: int,
    costs: Costs | None = None,
    memory_limit: Limit | None = None,
    stages_per_lane: int | None = None,
    two_ways: bool = True,
) -> Schedule:
    """Make a schedule for given costs and memory from the named schedules and a search; see `synthesize`.

    `two_ways=False` leaves out schedules that keep the weights of each stage on two lanes.
    """
    per_lane = stages_per_lane or _stages_in(costs, lanes)
    named = [
        partial(build, entry.name, lanes=lanes, micro_batches=micro_batches, stages_per_lane=per_lane, costs=costs)
        for entry in CATALOG
        if entry.trains_exactly and (two_ways or not entry.doubles_weights)
    ]
    return synthesize(lanes, micro_batches, costs, memory_limit, stages_per_lane=per_lane, named=named)


def _stages_in(costs: Costs | None, lanes: int) -> int:
    """Return the number of stages per lane that the costs imply."""
    counts = [len(value) for value in vars(costs).values() if isinstance(value, tuple)] if costs else []
    if counts and counts[0] % lanes:
        raise ScheduleError(f"costs have {counts[0]} stages, which cannot be divided evenly by {lanes} lanes")
    return counts[0] // lanes if counts else 1


# The names of torch.distributed.pipelining.
_ALIASES = {
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "looped_bfs",
    "zbvzerobubble": "zb_v",
    "dualpipev": "dualpipe_v",
}

_AUTO = Entry("auto", _auto, "the best for the given costs and memory limit, by search", "docs/design/search.md")
_REGISTRY = Registry([*CATALOG, _AUTO], _ALIASES)
