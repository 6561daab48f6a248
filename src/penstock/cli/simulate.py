"""penstock simulate: build, simulate, compare and draw schedules."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from penstock.cli import options, show
from penstock.deciding.defaults import EXPLORED_LANES, EXPLORED_MICRO_BATCHES, SCHEDULE
from penstock.errors import CostError, ScheduleError, UsageError
from penstock.model.costs import Costs
from penstock.planning.simulate import simulate as run_simulation
from penstock.report.timeline import Timeline
from penstock.report.units import parse_bytes, parse_seconds
from penstock.schedule.keep_policies import Keep, check_keep, listed
from penstock.schedule.lower import Lowered, lower
from penstock.schedule.schedule import Schedule
from penstock.schedules import build, describe, find_faults, load_csv, names, verify

_WHAT, _COSTS, _SHOW = "Schedule", "Costs", "Output"


def simulate(
    schedule: Annotated[
        str, typer.Option(help="A schedule by name (see --list), or a CSV file.", rich_help_panel=_WHAT)
    ] = SCHEDULE,
    lanes: Annotated[int | None, typer.Option(help="Number of lanes; 4 by default.", rich_help_panel=_WHAT)] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Micro-batches per step; 8 by default.", rich_help_panel=_WHAT)
    ] = None,
    stages_per_lane: Annotated[
        int | None, typer.Option(help="Stages per lane, if the schedule leaves it open.", rich_help_panel=_WHAT)
    ] = None,
    compare: Annotated[
        str, typer.Option(help="Further schedules to compare with, separated by commas.", rich_help_panel=_WHAT)
    ] = "",
    two_ways: Annotated[
        bool, typer.Option(help="Allow auto to keep the weights of each stage on two lanes.", rich_help_panel=_WHAT)
    ] = False,
    keep: Annotated[
        str,
        typer.Option(help=f"What stages do with saved values: {listed(get_args(Keep))}.", rich_help_panel=_WHAT),
    ] = "hold",
    forward: Annotated[
        str,
        typer.Option(
            help="Seconds of the forward of a lane for one micro-batch, such as 18.5ms, shared evenly by its stages; or"
            " one number per stage, with commas.",
            rich_help_panel=_COSTS,
        ),
    ] = "1",
    backward: Annotated[
        str,
        typer.Option(
            help="The same for the full backward; by default the sum of its two parts.", rich_help_panel=_COSTS
        ),
    ] = "",
    input_grad: Annotated[
        str,
        typer.Option(help="The same for the input gradient; by default equal to the forward.", rich_help_panel=_COSTS),
    ] = "",
    weight_grad: Annotated[
        str,
        typer.Option(
            help="The same for the weight gradient; by default equal to the input gradient.", rich_help_panel=_COSTS
        ),
    ] = "",
    transfer: Annotated[
        str, typer.Option(help="Seconds until another lane sees a value.", rich_help_panel=_COSTS)
    ] = "0",
    saved_bytes: Annotated[
        str,
        typer.Option(
            help="Bytes that a lane saves for one micro-batch, such as 512MiB; or one number per stage.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    pending_bytes: Annotated[
        str,
        typer.Option(
            help="The part of --saved-bytes that the weight gradient needs; by default all.", rich_help_panel=_COSTS
        ),
    ] = "",
    memory_limit: Annotated[
        str,
        typer.Option(
            help="Memory limit of each lane, such as 16GiB; or one per lane. Needs --saved-bytes.",
            rich_help_panel=_COSTS,
        ),
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write a page with timelines to zoom and compare.", rich_help_panel=_SHOW)
    ] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto.", rich_help_panel=_SHOW)] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write the schedule as a CSV file of torch.distributed.pipelining.", rich_help_panel=_SHOW),
    ] = None,
    chart: Annotated[bool, typer.Option(help="Draw the lanes.", rich_help_panel=_SHOW)] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.", rich_help_panel=_SHOW)] = False,
    list_all: Annotated[
        bool,
        typer.Option("--list", help="List all schedules, each with a summary and its paper.", rich_help_panel=_SHOW),
    ] = False,
) -> None:
    """Simulate a schedule: step time, bubble and memory, as a table, a chart or a page.

    [bold]Examples[/bold]

      penstock simulate --schedule zb_v --lanes 8 --micro-batches 32 --compare 1f1b,zb_h1

      penstock simulate --schedule auto --forward 1,2,1,1.5 --transfer 0.1 --html step.html
    """
    from penstock.report.timeline_page import write_html

    if list_all:
        show.list_schedules(as_json=as_json)
        return
    job = Job(
        schedules=tuple(dict.fromkeys((schedule, *(name.strip() for name in compare.split(",") if name.strip())))),
        lanes=lanes,
        micro_batches=micro_batches,
        stages_per_lane=stages_per_lane,
        two_ways=two_ways,
        keep=keep,
        seconds={"forward": forward, "backward": backward, "input_grad": input_grad, "weight_grad": weight_grad},
        transfer=transfer,
        held={"saved_bytes": saved_bytes, "pending_bytes": pending_bytes},
        memory_limit=memory_limit,
    )
    job.check()
    options.check_outputs([path for path in (html, chrome, csv) if path is not None])
    results = show.run_with_progress(job, quiet=as_json)
    writers: options.Writers = {
        "page": (html, partial(write_html, [result.timeline for result in results])),
        "trace": (chrome, results[0].timeline.to_chrome),
        "csv": (csv, results[0].schedule.to_csv),
    }
    written = options.write_files(writers)
    if as_json:
        typer.echo(json.dumps({"schedules": [result.figures() for result in results], "written": written}, indent=2))
        return
    show.table(results)
    if chart:
        show.charts(results)
    for what, path in written.items():
        show.note(f"{what}: {path}")
    if csv is not None and (results[0].schedule.is_bidirectional or results[0].schedule.versions is not None):
        show.note("torch does not support stages on two lanes or updates within a step, so it will refuse this CSV")


# ---- the job: the options as values, and its results


@dataclass(frozen=True)
class Result:
    """One schedule with its timeline; `over_limit`: whether it exceeds the memory limit."""

    schedule: Schedule
    timeline: Timeline
    over_limit: bool = False

    def figures(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        timeline, schedule = self.timeline, self.schedule
        return {
            "schedule": schedule.name,
            "lanes": schedule.num_lanes,
            "stages": schedule.num_stages,
            "micro_batches": schedule.num_mbs,
            "actions": schedule.num_actions,
            "weights_on_two_lanes": schedule.is_bidirectional,
            "fits_memory_limit": not self.over_limit,
            "step_seconds": timeline.step_seconds,
            "lane_seconds": list(timeline.lane_seconds),
            "bubble_over_makespan": timeline.bubble,
            "bubble_over_longest_lane_span": timeline.span_bubble,
            "peak_micro_batches": timeline.peak_micro_batches,
            "peak_saved_stage_micro_batches": list(timeline.peak_saved),
            "peak_bytes": list(timeline.peak_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of the command line; numbers are still texts."""

    schedules: tuple[str, ...]
    seconds: dict[str, str]
    held: dict[str, str]
    lanes: int | None = None
    micro_batches: int | None = None
    stages_per_lane: int | None = None
    two_ways: bool = False
    keep: str = "hold"
    transfer: str = "0"
    memory_limit: str = ""

    def check(self) -> None:
        """Check the options before anything is built."""
        faults = [str(fault) for name in self.schedules if (fault := _unknown(name))]
        if faults:
            raise ScheduleError("; ".join(faults))
        is_file = [_is_file(name) for name in self.schedules]
        if all(is_file) and (self.lanes is not None or self.micro_batches is not None):
            raise UsageError("a CSV file defines lanes and micro-batches: leave --lanes and --micro-batches out")
        if self.two_ways and not any(name.strip().lower() == "auto" for name in self.schedules):
            raise UsageError("--two-ways only applies to auto")
        held = {name: text.strip() for name, text in self.held.items()}
        if held.get("pending_bytes") and not held.get("saved_bytes"):
            raise CostError("--pending-bytes needs --saved-bytes")
        if self.memory_limit.strip() and not held.get("saved_bytes"):
            raise CostError("--memory-limit needs --saved-bytes")
        check_keep(self.keep, 1)  # type: ignore[arg-type]  # raises if this is not a policy

    def run(self, name: str, *, must_fit: bool) -> Result:
        """Build, verify and simulate one schedule; with `must_fit`, refuse one that exceeds the memory limit."""
        try:
            schedule = self._schedule(name.strip())
            verify(schedule)
            result = self._simulate(schedule)
            if must_fit and result.over_limit:
                lowered, costs = self._lowered(schedule)
                verify(lowered, costs=costs, memory_limit=self._limit())  # raises, and says by how much
        except CostError as error:
            raise CostError(f"{name}: {error}" if len(self.schedules) > 1 else str(error)) from error
        return result

    def _lowered(self, schedule: Schedule) -> tuple[Lowered, Costs]:
        keep: Keep = self.keep  # type: ignore[assignment]  # checked before
        return lower(schedule, keep=keep), self._costs(schedule.num_stages, schedule.num_lanes)

    def _simulate(self, schedule: Schedule) -> Result:
        lowered, costs = self._lowered(schedule)
        faults = find_faults(lowered, costs=costs, memory_limit=self._limit())
        is_over = any(fault.kind == "memory" for fault in faults)
        return Result(schedule, run_simulation(lowered, costs), over_limit=is_over)

    def _limit(self) -> Any:  # noqa: ANN401 - one number or several
        return options.numbers("memory-limit", self.memory_limit, parse_bytes)

    def _schedule(self, name: str) -> Schedule:
        if _is_file(name):
            return load_csv(name)
        entry = describe(name)
        if entry.name != "auto":
            given = self.stages_per_lane
            if len(self.schedules) > 1 and "stages_per_lane" not in entry.options:
                given = None  # in a comparison, the option applies only to schedules that leave it open
            return self._build(name, given)
        return self._auto(name)

    def _auto(self, name: str) -> Schedule:
        """Return the best schedule of auto with one and two stages per lane, and with and without the limit.

        With recompute or offload, a schedule holds less than auto assumes, so one made without a limit may fit.
        """
        is_open = self.stages_per_lane is None and self._is_one_number_a_lane()
        per_lane = [1, 2] if is_open else [self.stages_per_lane]
        limits = [self._limit()] if self.keep == "hold" or not self.memory_limit.strip() else [None, self._limit()]
        found: list[tuple[bool, float, Schedule]] = []
        refused: list[ScheduleError] = []
        for stages, limit in product(per_lane, limits):
            try:
                schedule = self._build(name, stages, two_ways=self.two_ways, memory_limit=limit)
            except ScheduleError as error:
                refused.append(error)
                continue
            result = self._simulate(schedule)
            found.append((result.over_limit, result.timeline.step_seconds, schedule))
        if not found:
            raise refused[0]
        return min(found, key=lambda candidate: candidate[:2])[2]

    def _build(self, name: str, per_lane: int | None, **options: Any) -> Schedule:  # noqa: ANN401 - options of auto
        lanes = EXPLORED_LANES if self.lanes is None else self.lanes
        mbs = EXPLORED_MICRO_BATCHES if self.micro_batches is None else self.micro_batches
        stages = _default_stages(name) if per_lane is None else per_lane
        costs = self._costs(lanes * stages, lanes) if lanes > 0 and stages > 0 else None
        return build(name, lanes=lanes, micro_batches=mbs, stages_per_lane=per_lane, costs=costs, **options)

    def _is_one_number_a_lane(self) -> bool:
        texts = [*self.seconds.values(), *self.held.values(), self.transfer]
        return not any("," in text for text in texts)

    def _costs(self, num_stages: int, num_lanes: int) -> Costs:
        """Return the costs of stages; a single number is for a lane, and its stages share it evenly."""
        share = num_lanes / num_stages
        given = {
            name: options.numbers(name.replace("_", "-"), text, parse)
            for texts, parse in ((self.seconds, parse_seconds), (self.held, parse_bytes))
            for name, text in texts.items()
        }
        spread = {name: value * share if isinstance(value, float) else value for name, value in given.items()}
        known = {name: value for name, value in spread.items() if value is not None}
        return Costs(transfer=options.numbers("transfer", self.transfer, parse_seconds) or 0.0, **known)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".csv") or (name.lower() not in names() and Path(name).is_file())


def _unknown(name: str) -> ScheduleError | None:
    if _is_file(name.strip()):
        return None
    try:
        describe(name)
    except ScheduleError as error:
        return error
    return None


def _default_stages(name: str) -> int:
    """Return the default number of stages per lane."""
    entry = describe(name)
    parameter = inspect.signature(entry.builder).parameters.get("stages_per_lane")
    default = parameter.default if parameter is not None else None
    return entry.stages_per_lane or (default if isinstance(default, int) else 1)
