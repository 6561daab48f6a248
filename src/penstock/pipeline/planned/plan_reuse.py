"""Plan reuse: takes the plan of a run folder when a training resumes there.

Cuts depend on measured times, which differ from run to run. So a resumed training uses the plan of its folder again. A
plan contains the fingerprint of its model and settings, and is used only if both are still the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deciding.plan import Plan
from penstock.errors import UsageError, warn_user
from penstock.schedule.text_format import to_json

if TYPE_CHECKING:
    from penstock.model.capture.capture import Captured
    from penstock.pipeline.planned.planned_model import Request
    from penstock.schedule.schedule import Schedule


def fingerprint_of(request: Request, captured: Captured, first: Schedule) -> dict[str, Any]:
    """Return everything that a plan depends on, except measured times, as plain JSON data."""
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
        "keep": request.keep_policies,
        "memory_limit": request.memory_limit,
        "cluster": None if request.cluster is None else repr(request.cluster),
    }
    plain: dict[str, Any] = json.loads(json.dumps(asked, default=list))
    return plain


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def reusable_plan(path: Path, asked: Mapping[str, Any], captured: Captured, first: Schedule) -> Plan | None:
    """Return the plan of a run folder, or None; warn if there is a plan that was not made for the current request."""
    if not path.exists():
        return None
    try:
        plan = Plan.from_json(path)
    except UsageError as error:
        _refuse(str(error))
        return None
    if changed := plan.changes_since(asked):
        _refuse(f"{path}: was made for another model or other settings ({'; '.join(changed)})")
        return None
    if faults := plan.faults_for(asked, captured.graph):
        _refuse(f"{path}: is damaged: {'; '.join(faults)}")
        return None
    return plan if plan.is_for_costs else replace(plan, schedule=first)


def _refuse(why: str) -> None:
    warn_user(f"plan: {why}; cuts and schedule are decided again")
