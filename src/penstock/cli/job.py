"""A job of `penstock simulate`: its options read and checked, and its results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import CostError
from penstock.model.costs import Costs
from penstock.planning.simulate import simulate
from penstock.report.format import parse_bytes
from penstock.report.timeline import Timeline
from penstock.schedule.lower import Keep, check_keep
from penstock.schedule.schedule import Schedule
from penstock.schedules import build, load_csv, names, verify

__all__ = ["Job", "Result"]


@dataclass(frozen=True)
class Result:
    """One schedule with its timeline."""

    schedule: Schedule
    timeline: Timeline

    @property
    def peak_mbs(self) -> float:
        """The most micro-batches a lane holds, each counted whole when all of the lane's stages hold it."""
        per_lane = max(1, self.schedule.num_stages // self.schedule.num_lanes)
        return max(self.timeline.peak_saved) / per_lane

    def figures(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        timeline, schedule = self.timeline, self.schedule
        return {
            "schedule": schedule.name,
            "lanes": schedule.num_lanes,
            "stages": schedule.num_stages,
            "micro_batches": schedule.num_mbs,
            "actions": schedule.num_actions,
            "step_seconds": timeline.step_seconds,
            "lane_seconds": list(timeline.lane_seconds),
            "bubble_over_makespan": timeline.bubble,
            "bubble_over_longest_lane_span": timeline.span_bubble,
            "peak_saved_stage_micro_batches": list(timeline.peak_saved),
            "peak_bytes": list(timeline.peak_bytes),
        }


@dataclass(frozen=True)
class Job:
    """What to simulate, as the command line gives it: numbers still as text."""

    schedules: tuple[str, ...]
    lanes: int
    micro_batches: int
    stages_per_lane: int | None
    keep: str
    seconds: dict[str, str]
    transfer: str
    held: dict[str, str]
    memory_limit: str

    def run(self, name: str) -> Result:
        """Build, verify and simulate one schedule."""
        schedule = self._schedule(name.strip())
        costs = self._costs(schedule.num_stages, schedule.num_lanes)
        limit = _numbers("memory-limit", self.memory_limit)
        verify(schedule, costs=costs, memory_limit=limit)
        keep: Keep = self.keep  # type: ignore[assignment]  # checked next
        check_keep(keep, schedule.num_stages)
        return Result(schedule, simulate(schedule, costs, keep=keep))

    def _schedule(self, name: str) -> Schedule:
        if name.lower().endswith(".csv") or (Path(name).is_file() and name not in names()):
            return load_csv(name)
        per_lane = self.stages_per_lane if len(self.schedules) == 1 else self._stages_per_lane(name)
        stages = self.lanes * (per_lane or _default_stages(name))
        costs = self._costs(stages, self.lanes) if self.lanes > 0 else None
        limit = _numbers("memory-limit", self.memory_limit)
        return build(
            name,
            lanes=self.lanes,
            micro_batches=self.micro_batches,
            stages_per_lane=per_lane,
            costs=costs,
            memory_limit=limit,
        )

    def _stages_per_lane(self, name: str) -> int | None:
        """In a comparison the option goes to those schedules that leave it open."""
        from penstock.schedules import describe

        return self.stages_per_lane if "stages_per_lane" in describe(name).options else None

    def _costs(self, num_stages: int, num_lanes: int) -> Costs:
        """Return costs a stage; one number is a lane's, shared evenly by its stages."""
        share = num_lanes / num_stages
        texts = {**self.seconds, **self.held}
        given = {name: _numbers(name.replace("_", "-"), text) for name, text in texts.items()}
        spread = {name: value * share if isinstance(value, float) else value for name, value in given.items()}
        if spread["backward"] is None and spread["input_grad"] is None and spread["weight_grad"] is None:
            spread.pop("backward")
        return Costs(
            transfer=_numbers("transfer", self.transfer) or 0.0, **{k: v for k, v in spread.items() if v is not None}
        )


def _default_stages(name: str) -> int:
    """Return how many stages a lane has if nothing is said."""
    import inspect

    from penstock.schedules import describe

    entry = describe(name)
    parameter = inspect.signature(entry.builder).parameters.get("stages_per_lane")
    default = parameter.default if parameter is not None else None
    return entry.stages_per_lane or (default if isinstance(default, int) else 1)


def _numbers(option: str, text: str) -> float | list[float] | None:
    """Read one number, or several with commas; None for nothing."""
    if not text.strip():
        return None
    words = text.split(",")
    try:
        numbers = [parse_bytes(word) for word in words]
    except ValueError:
        raise CostError(f"--{option}: {text!r} is not a number, or numbers with commas between them") from None
    return numbers[0] if len(numbers) == 1 else numbers
