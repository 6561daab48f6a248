"""Plan: all decisions for one model as frozen data: capture path, cuts, schedule, keep policy and their reasons.

`penstock.plan` or a `Pipeline` makes a plan once. It can then be run, printed, written and read without deciding
anything again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import GraphError, PenstockError, UsageError
from penstock.files import write_whole
from penstock.schedule.schedule import Schedule
from penstock.schedule.text_format import from_json, to_json

if TYPE_CHECKING:
    from penstock.model.graph import Graph
    from penstock.planning.explain.explanation import Explanation

NAME = "plan.json"  # in a run folder
_FORMAT = "penstock plan 1"


@dataclass(frozen=True)
class Plan:
    """How a model is cut and run. `print(plan)` shows the tables; `to_json` and `Plan.from_json` write and read it.

    Attributes:
        schedule: what the lanes run; it also defines the numbers of lanes, stages and micro-batches.
        cuts: for each cut, the number of the node after it.
        keep: what stages do with saved values: one policy, or one per stage.
        recomputed: for `keep="fit"`, the nodes of each stage that are recomputed.
        capture_path: how the model was captured: "direct", "export" or "replay".
        asked: what the plan was made for: the fingerprint of the model and the options that affect the decision.
        explanation: the profile, the tables and the predicted step; None if there was nothing to choose, so that
            nothing was measured.
        is_for_costs: whether the schedule was made for the profile, so that its name is not enough to build it again.
        source: the file from which the plan was read; empty if it was made in this process.
    """

    schedule: Schedule
    cuts: tuple[int, ...]
    keep: str | tuple[str, ...] = "hold"
    recomputed: tuple[tuple[range, ...], ...] | None = None
    capture_path: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    explanation: Explanation | None = field(default=None, compare=False, repr=False)
    is_for_costs: bool = False
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.cuts) != self.schedule.num_stages - 1:
            raise UsageError(
                f"plan: {len(self.cuts)} cuts make {len(self.cuts) + 1} stages, but the schedule has "
                f"{self.schedule.num_stages}"
            )

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.schedule.num_lanes

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return self.schedule.num_mbs

    @property
    def memory_limit(self) -> Any:  # noqa: ANN401 - as it was given
        """The requested memory limit of each lane."""
        return self.asked.get("memory_limit")

    def explain(self) -> Explanation:
        """Return the tables and the predicted step, which can be printed or written as HTML or JSON.

        Raises:
            UsageError: if nothing was measured for this plan.
        """
        if self.explanation is None:
            raise UsageError(
                "plan: there was nothing to choose, so nothing was measured; to measure, call "
                "penstock.plan(model, example=...) or explain() of the pipeline"
            )
        return self.explanation

    def faults_for(self, asked: Mapping[str, Any], graph: Graph) -> list[str]:
        """Return the reasons why the plan does not fit a captured model; empty if it fits."""
        faults = [
            f"it was made for another model ({name}: {self.asked[name]}, now {asked[name]})"
            for name in ("nodes", "model")
            if name in self.asked and self.asked[name] != asked[name]
        ][:1]
        if not faults:
            try:
                graph.check_cuts(self.cuts)
            except GraphError as error:
                faults = [str(error)]
        return faults

    def changes_since(self, asked: Mapping[str, Any]) -> list[str]:
        """Return the differences between the current request and the request for which the plan was made."""
        return [
            "another model" if name == "model" else f"{name}: {self.asked.get(name)}, now {asked.get(name)}"
            for name in dict.fromkeys([*asked, *self.asked])
            if self.asked.get(name) != asked.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON: first the readable part, then everything needed to run it."""
        schedule = self.schedule
        found: dict[str, Any] = {
            "format": _FORMAT,
            "schedule": schedule.name,
            "lanes": schedule.num_lanes,
            "stages": schedule.num_stages,
            "micro_batches": schedule.num_mbs,
            "lane_of": [list(way) for way in schedule.ways],
            "cuts": list(self.cuts),
            "keep": self.keep if isinstance(self.keep, str) else list(self.keep),
            "capture_path": self.capture_path,
        }
        if self.explanation is not None:
            timeline = self.explanation.timeline
            found["predicted"] = {"step_seconds": timeline.step_seconds, "bubble": timeline.bubble}
        if self.recomputed is not None:
            found["recomputed"] = [[[run.start, run.stop] for run in stage] for stage in self.recomputed]
        found |= {"is_for_costs": self.is_for_costs, "asked": dict(self.asked), "actions": to_json(schedule)}
        found["explanation"] = None if self.explanation is None else self.explanation.to_plain()
        return found

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Return the plan as JSON; with a path, also write it to this file atomically.

        Raises:
            OutputError: if the file cannot be written.
        """
        text = lines_of(self.to_dict())
        if path is not None:
            write_whole(path, text)
        return text

    @classmethod
    def from_json(cls, given: str | PathLike[str]) -> Plan:
        """Read a plan from a file, or from the text that `to_json` returned.

        Raises:
            UsageError: if it cannot be read or is not a plan.
        """
        is_text = isinstance(given, str) and given.lstrip().startswith("{")
        name = "plan" if is_text else str(given)
        try:
            text = str(given) if is_text else Path(given).read_text(encoding="utf-8")
            found = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{name}: cannot be read as a plan: {error}") from error
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise UsageError(f"{name}: is not a plan of this version of Penstock")
        try:
            return cls.from_dict(found, source="" if is_text else name)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, PenstockError) as error:
            raise UsageError(f"{name}: is a damaged plan ({type(error).__name__}: {error!s:.200})") from error

    @classmethod
    def from_dict(cls, found: Mapping[str, Any], source: str = "") -> Plan:
        """Return the plan that `to_dict` wrote."""
        from penstock.planning.explain.explanation import Explanation

        schedule, cuts, keep = from_json(found["actions"]), tuple(int(cut) for cut in found["cuts"]), found["keep"]
        runs, told = found.get("recomputed"), found.get("explanation")
        return cls(
            schedule,
            cuts,
            keep=keep if isinstance(keep, str) else tuple(keep),
            recomputed=None if runs is None else tuple(tuple(range(*run) for run in stage) for stage in runs),
            capture_path=found["capture_path"],
            asked=dict(found["asked"]),
            explanation=None if told is None else Explanation.from_plain(told, schedule, cuts),
            is_for_costs=bool(found["is_for_costs"]),
            source=source,
        )

    def _repr_html_(self) -> str:
        """Return the page of the explanation for the output of a cell in a notebook; without it, the text."""
        from penstock.report.notebook import as_text

        return as_text(self) if self.explanation is None else self.explanation._repr_html_()

    def __str__(self) -> str:
        if self.explanation is not None:
            return str(self.explanation)
        counts = f"{self.lanes} lanes, {self.micro_batches} micro-batches"
        return f"schedule {self.schedule.name} on {counts}, cuts at {list(self.cuts)}, keep: {self.keep}"


def lines_of(found: Mapping[str, Any]) -> str:
    """Return JSON with one line per key, so that the first lines are readable and long values stay on one line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def plan_path(given: str | PathLike[str]) -> Path:
    """Return the file of a plan, given the file or a run folder."""
    path = Path(given)
    return path / NAME if path.is_dir() or path.suffix != ".json" else path


def plan_to_run(given: Plan | str | PathLike[str] | None) -> Plan | None:
    """Return the plan that must be run, from a plan or its file; None for a run folder, whose plan is optional.

    Raises:
        UsageError: if the file does not exist or is not a plan.
    """
    if given is None or isinstance(given, Plan):
        return given
    path = Path(given)
    return Plan.from_json(path) if path.suffix == ".json" and not path.is_dir() else None


def check_free(plan: Plan, given: Mapping[str, object]) -> None:
    """Refuse options that differ from the decisions of a plan with a UsageError."""
    own = {name: getattr(plan, name) for name in ("lanes", "micro_batches", "keep", "cuts")}
    own["schedule"] = plan.schedule.name
    faults = [
        f"{name}: {value!r:.60}" + (f" (the plan has {own[name]!r:.60})" if name in own else "")
        for name, value in given.items()
        if value is not None and not _is_same(value, own.get(name))
    ]
    if faults:
        raise UsageError(f"plan: it already decides these options, so leave them out: {'; '.join(faults)}")


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return list(one) == list(other)
    return one == other
