"""Out of memory: recognise such errors, and say which settings would need less memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.errors import LostError, PenstockError
from penstock.faults.lost_peers import causes_of
from penstock.model.profiling.analytic import analytic
from penstock.planning.partition.partition import partition
from penstock.planning.partition.recompute_selection import select_recomputed
from penstock.planning.simulate import simulate
from penstock.report.units import show_bytes
from penstock.schedule.keep_policies import POLICIES
from penstock.schedules import build

if TYPE_CHECKING:
    from penstock.model.profile import Profile
    from penstock.pipeline.pipeline import Pipeline
    from penstock.schedule.schedule import Schedule

# texts of allocators without an exception type; the last two appear in messages from other processes
_SIGNS = (
    "can't allocate memory",
    "annot allocate memory",
    "out of memory",
    "not enough memory",
    "OutOfMemoryError:",
    "MemoryError:",
)
_WHERE = re.compile(r"lane (\d+), stage (\d+), micro-batch (\d+), action (\S+)")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one of its causes, means that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(ValueError("a mistake"))
    (True, False)
    """
    for one in causes_of(error):
        if isinstance(one, LostError):  # it only guesses
            return False
        if isinstance(one, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(one, (RuntimeError, OSError)) and any(sign in str(one) for sign in _SIGNS):
            return True
    return False


@dataclass(frozen=True)
class Option:
    """A setting for the same step."""

    words: str  # the setting
    lane_bytes: tuple[float, ...]  # the peak of each lane: weights, gradients, optimizer state and saved values
    extra: str = ""  # its cost, in words

    @property
    def peak_bytes(self) -> float:
        """The peak memory of the fullest lane."""
        return max(self.lane_bytes)


def advice(pipe: Pipeline, error: BaseException) -> str:
    """Return text: where memory ran out, how much each lane holds, and what would need less.

    The figures are counted from the model's operations; nothing is measured, and no device memory is used.
    """
    match = _WHERE.search(str(error))
    where = f"lane {match[1]}, stage {match[2]}, micro-batch {match[3]}, at {match[4]}" if match else "a lane"
    lines = [f"memory ran out on {where}."]
    try:
        now, others = options(pipe)
    except Exception as trouble:  # counting may fail in the model itself; the original error must still be reported
        return f"{lines[0]} The advice failed: {type(trouble).__name__}: {trouble}"
    lane = int(match[1]) if match else max(range(len(now.lane_bytes)), key=now.lane_bytes.__getitem__)
    per_lane = ", ".join(f"lane {lane} {show_bytes(size)}" for lane, size in enumerate(now.lane_bytes))
    lines.append(f"Predicted now: {per_lane}, without the workspace of kernels.")
    less = sorted((o for o in others if o.peak_bytes < now.peak_bytes * 0.98), key=lambda o: o.peak_bytes)
    if not less:
        lines.append("No known setting needs less memory. Use smaller batches, or devices with more memory.")
        return "\n".join(lines)
    lines.append("Settings that need less memory, the smallest first:")
    for option in less:
        saved = now.peak_bytes - option.peak_bytes
        here = f" (here {show_bytes(option.lane_bytes[lane])})" if len(option.lane_bytes) == len(now.lane_bytes) else ""
        extra = f"; {option.extra}" if option.extra else ""
        lines.append(
            f"  {option.words}: {show_bytes(option.peak_bytes)} on the fullest lane{here}, "
            f"{show_bytes(saved)} less{extra}"
        )
    return "\n".join(lines)


def options(pipe: Pipeline) -> tuple[Option, list[Option]]:
    """Return the memory of the current settings and of other settings."""
    schedule, cuts = pipe.schedule, pipe.cuts
    total = pipe.internals.captured.call.batch_size  # of the example: the batch that failed is not known here
    size = -(-total // min(total, schedule.num_mbs))  # of a micro-batch
    profile = analytic(pipe.internals.captured, batch_size=size)
    keep = pipe.internals.keep
    now = Option("as it is", _lane_bytes(profile, schedule, cuts, keep))
    found = []
    for policy in ("recompute", "offload"):
        everywhere = (policy,) * schedule.num_stages
        if keep != everywhere:
            held = _lane_bytes(profile, schedule, cuts, everywhere)
            found.append(Option(f'keep="{policy}"', held, POLICIES[policy].price))
    found += _fitted(profile, schedule, cuts, now)
    found += _smaller(pipe, schedule, cuts, keep, size)
    found += _more_lanes(pipe, profile)
    return now, found


def _fitted(profile: Profile, schedule: Schedule, cuts: Sequence[int], now: Option) -> Iterator[Option]:
    """Yield the option to recompute only as much as necessary, with the smallest memory limit that works."""
    least = None
    for percent in range(90, 9, -10) if schedule.versions is None else ():
        limit = float(int(now.peak_bytes * percent / 100))
        try:
            select_recomputed(profile, cuts, schedule, limit)
        except PenstockError:
            break
        least = limit
    if least is not None:
        held = tuple(min(size, least) for size in now.lane_bytes)
        yield Option(f'keep="fit", memory_limit={least:.0f}', held, POLICIES["fit"].price)


def _smaller(
    pipe: Pipeline, schedule: Schedule, cuts: Sequence[int], keep: Sequence[str], size: int
) -> Iterator[Option]:
    """Yield the option of twice as many micro-batches of half the size."""
    if size < 2:
        return
    try:
        twice = build(
            schedule.name, lanes=schedule.num_lanes, micro_batches=2 * schedule.num_mbs, stages_per_lane=_per(schedule)
        )
        half = analytic(pipe.internals.captured, batch_size=-(-size // 2))
        held = _lane_bytes(half, twice, cuts, keep)
    except PenstockError:  # a schedule without a builder
        return
    yield Option(f"micro_batches={2 * schedule.num_mbs}", held, f"{-(-size // 2)} samples each instead of {size}")


def _more_lanes(pipe: Pipeline, profile: Profile) -> Iterator[Option]:
    """Yield the option of twice as many lanes, each on its own device."""
    schedule, keep = pipe.schedule, set(pipe.internals.keep)
    how = keep.pop() if len(keep) == 1 else "hold"
    try:
        wide = build(
            schedule.name, lanes=2 * schedule.num_lanes, micro_batches=schedule.num_mbs, stages_per_lane=_per(schedule)
        )
        found = partition(profile, schedule=wide, keep=POLICIES[how].planned_as)
        held = _lane_bytes(profile, wide, found.cuts, (how,) * wide.num_stages)
    except PenstockError:  # too many stages for the model
        return
    yield Option(f"{wide.num_lanes} lanes, each on its own device", held)


def _per(schedule: Schedule) -> int | None:
    per_lane = schedule.num_stages // schedule.num_lanes
    return per_lane if per_lane > 1 else None


def _lane_bytes(profile: Profile, schedule: Schedule, cuts: Sequence[int], keep: Sequence[str]) -> tuple[float, ...]:
    """Return the peak memory of each lane in a simulated step."""
    timeline = simulate(schedule, profile.costs(tuple(cuts)), keep=tuple(keep))  # type: ignore[arg-type]
    ranges = profile.graph.stages(tuple(cuts))
    held = []
    for lane, peak in enumerate(timeline.peak_bytes):
        nodes = [node for stage in schedule.stages_of(lane) for node in ranges[stage]]
        held.append(peak + profile.state_bytes(nodes))
    return tuple(held)
