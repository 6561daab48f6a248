"""Plans: what was decided, as a file of a run folder, and its use by a training that goes on there.

Cuts follow measured times, which differ from run to run. A plan names what was asked for, so that it is used again only
for the same model and the same settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import GraphError, UsageError
from penstock.schedule.plain import from_json, to_json

if TYPE_CHECKING:
    from penstock.model.capture import Captured
    from penstock.pipeline.build import Request
    from penstock.pipeline.pipeline import Pipeline
    from penstock.schedule.schedule import Schedule

__all__ = ["NAME", "asked_of", "kept_choice", "plan_path", "plan_text"]

NAME = "plan.json"


def plan_path(given: str | PathLike[str]) -> Path:
    """Return the file of a plan: a run folder may be given for it."""
    path = Path(given)
    return path / NAME if path.is_dir() or path.suffix != ".json" else path


def asked_of(request: Request, captured: Captured, first: Schedule) -> dict[str, Any]:
    """Return all that a decision may depend on, but for the time that things take; as JSON can hold it."""
    graph = captured.graph
    nodes = [f"{node.name} {node.op} {node.module} {node.parameters}" for node in graph.nodes]
    held = [f"{parameter.name} {parameter.num_bytes}" for parameter in graph.parameters.values()]
    is_named = isinstance(request.schedule, str) and not request.schedule.endswith(".csv")
    asked = {
        "model": _digest("\n".join([*nodes, *held])),
        "nodes": len(graph.nodes),
        "capture": captured.path,
        "samples": captured.call.batch_size,
        "device": request.device.type,
        "schedule": request.schedule if is_named else f"{first.name} {_digest(json.dumps(to_json(first)))}",
        "lanes": first.num_lanes,
        "micro_batches": first.num_mbs,
        "stages_per_lane": request.stages_per_lane,
        "cuts": list(request.cuts),
        "keep": request.keep,
        "memory_limit": request.memory_limit,
        "cluster": None if request.cluster is None else repr(request.cluster),
    }
    plain: dict[str, Any] = json.loads(json.dumps(asked, default=list))
    return plain


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_text(pipe: Pipeline, **beside: Any) -> str:  # noqa: ANN401 - whatever JSON can hold
    """Return what was decided, and what else there is to say, for people to read and for `kept_choice`."""
    decision = pipe._decision
    schedule, predicted = decision.schedule, decision.predicted()
    found: dict[str, Any] = {
        "schedule": schedule.name,
        "lanes": schedule.num_lanes,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_mbs,
        "lane_of": [list(way) for way in schedule.ways],
        "cuts": list(decision.cuts),
        "devices": list(map(str, pipe.devices)),
        "asked": dict(decision.asked),
    }
    if decision.recomputed is not None:
        found["recomputed"] = [[[run.start, run.stop] for run in stage] for stage in decision.recomputed]
    if decision.is_for_costs:
        found["actions"] = to_json(schedule)
    if predicted is not None:
        found["predicted"] = {"step_seconds": predicted.step_seconds, "bubble": predicted.bubble}
    return json.dumps(found | beside, indent=2) + "\n"


def kept_choice(
    path: Path, asked: Mapping[str, Any], captured: Captured, first: Schedule
) -> tuple[dict[str, Any] | None, str]:
    """Return the cuts and the schedule of a plan, or None; and why it cannot be used, where there is one."""
    try:
        plan = json.loads(path.read_text())
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        return None, f"{path}: cannot be read ({error})"
    before = plan.get("asked") if isinstance(plan, dict) else None
    if not isinstance(before, dict):
        return None, f"{path}: does not say what was asked for"
    if before != asked:
        changed = [
            "another model" if name == "model" else f"{name}: {before.get(name)}, now {asked.get(name)}"
            for name in dict.fromkeys([*asked, *before])
            if before.get(name) != asked.get(name)
        ]
        return None, f"{path}: was made for something else ({'; '.join(changed)})"
    try:
        schedule = from_json(plan["actions"]) if "actions" in plan else first
        cuts = [int(cut) for cut in plan["cuts"]]
        captured.graph.check_cuts(cuts)
        if len(cuts) != schedule.num_stages - 1:
            raise UsageError(f"{len(cuts)} cuts make {len(cuts) + 1} stages, not {schedule.num_stages}")
        recomputed = plan.get("recomputed")
    except (KeyError, TypeError, ValueError, GraphError, UsageError) as error:
        return None, f"{path}: is damaged ({error!r})"
    return {"cuts": cuts, "schedule": to_json(schedule), "recomputed": recomputed}, ""
