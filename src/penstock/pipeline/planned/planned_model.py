"""Planned model: captures a model, makes its plan, and cuts it according to the plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock._version import __version__
from penstock.deciding.cut_request import CutRequest, ProfileSource, Progress, explanation_of, name_of
from penstock.deciding.defaults import default_micro_batches
from penstock.deciding.plan import Plan, plan_path
from penstock.errors import PenstockError, UsageError, warn_user
from penstock.model.capture.capture import Captured, capture
from penstock.model.example import BatchLayout, Call, read_example
from penstock.model.stages import Chain
from penstock.pipeline.exactness.exactness import OnlyWholeError
from penstock.pipeline.planned.placement import with_threads
from penstock.pipeline.planned.plan_reuse import fingerprint_of, reusable_plan
from penstock.pipeline.splitting.batch_splits import PackedSplit, Split, split_batch
from penstock.planning.partition.cut_rules import find_places
from penstock.planning.partition.recompute_selection import select_recomputed
from penstock.runtime.keep.recompute import compound_chain
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.schedule.keep_policies import CHOSEN_BY_NODE, POLICIES
from penstock.schedule.schedule import Schedule
from penstock.schedules import load_csv

if TYPE_CHECKING:
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import Limit
    from penstock.report.timeline import Timeline

Model = nn.Module | Sequence[nn.Module] | Captured


def module_of(model: Model) -> tuple[nn.Module | Sequence[nn.Module], Captured | None]:
    """Return the module or the stage modules, and the captured model; None for it if `model` is not captured yet."""
    return (model.model, model) if isinstance(model, Captured) else (cast("nn.Module", model), None)


@dataclass(frozen=True)
class Request:
    """The arguments of `Pipeline` that the plan depends on."""

    model: nn.Module | Sequence[nn.Module]
    example: object
    schedule: str | Schedule | PathLike[str]
    lanes: int
    micro_batches: int | None
    stages_per_lane: int | None
    cuts: tuple[int | str, ...]
    keep_policies: str | tuple[str, ...]  # one for all stages, or one per stage
    memory_limit: Limit | None
    cluster: Cluster | None
    profile: Profile | str | PathLike[str] | None
    analytic: Rates | str | None
    capture_path: str
    device: torch.device
    progress: Progress | None
    num_threads: int | None = None  # torch threads per lane; the measurement uses as many
    layout: BatchLayout = field(default_factory=BatchLayout)  # the dimension of the batch in each tensor
    split: Split | None = None  # the user's function that cuts batches
    plan: Plan | str | PathLike[str] | None = None  # a plan to run, or a run folder whose plan is reused if it fits
    captured: Captured | None = None  # the captured model, if the user passed one

    @property
    def keep(self) -> str:
        """The keep policy for which the cuts are chosen."""
        return self.keep_policies if isinstance(self.keep_policies, str) else "hold"

    def read(self) -> tuple[Call, int]:
        """Return the call to capture, and the number of samples in the example.

        If the user splits batches, the first micro-batch is captured: Penstock itself cannot make such a batch smaller.
        """
        example, model = self.example, _first_module(self.model)
        if self.split is None:
            call = read_example(example, model, self.layout)
            return call, call.batch_size
        count = self.schedule.num_mbs if isinstance(self.schedule, Schedule) else self.micro_batches
        pieces = split_batch(self.split, example, None, count or default_micro_batches(self.lanes))
        calls = [read_example(piece, model, self.layout) for piece, _ in pieces]
        # one tensor defines the number of samples; others may have as many rows by chance
        first = calls[0]
        dims = tuple(first.batch_dim if name == first.batch_name else None for name in first.names)
        calls[0] = replace(first, batch_dims=dims)
        return calls[0], max(len(calls), sum(call.batch_size for call in calls))

    def cut_request(self, batch_size: int) -> CutRequest:
        """Return the request for cuts and a schedule, for an example with `batch_size` samples."""
        micro_batches = self.micro_batches
        if micro_batches is None:
            micro_batches = default_micro_batches(self.lanes, batch_size)
        schedule = self.schedule
        if not isinstance(schedule, (Schedule, str, PathLike)):
            raise UsageError(f"schedule: pass a name, a Schedule or a CSV file; given: {schedule!r:.60}")
        if not isinstance(schedule, Schedule) and (not isinstance(schedule, str) or schedule.endswith(".csv")):
            schedule = load_csv(Path(schedule))
        has_counts = isinstance(schedule, Schedule)
        if isinstance(schedule, Schedule) and schedule.num_lanes != self.lanes:
            raise UsageError(f"the schedule has {schedule.num_lanes} lanes, but the pipeline has {self.lanes}")
        if isinstance(schedule, Schedule) and self.micro_batches not in (None, schedule.num_mbs):
            raise UsageError(
                f"micro_batches: {self.micro_batches}, but the schedule has {schedule.num_mbs}; leave it out"
            )
        return CutRequest(
            schedule,
            None if has_counts else self.lanes,
            None if has_counts else micro_batches,
            stages_per_lane=None if has_counts else self.stages_per_lane,
            cuts=self.cuts,
            keep=POLICIES[self.keep].planned_as,
            memory_limit=self.memory_limit,
            cluster=self.cluster,
        )


@dataclass(frozen=True)
class PlannedModel:
    """A captured model with its plan."""

    captured: Captured  # the model as a graph
    plan: Plan  # the cuts, the schedule and the keep policies
    # explains the plan; on first use it profiles the model, if the plan was made without a profile
    explainer: _Explainer
    # returns the same cuts with twice as many micro-batches, or None if this is impossible
    smaller_micro_batches: Callable[[], PlannedModel | None] = lambda: None
    # the planned model whose micro-batches were halved to make this one, if there is one
    larger_micro_batches: PlannedModel | None = None

    def explain(self) -> Explanation:
        """Return the explanation of the plan; profile the model first if necessary."""
        return self.plan.explanation or self.explainer.explain()

    def predicted(self) -> Timeline | None:
        """Return the predicted step; None if the model was not profiled."""
        found = self.plan.explanation or self.explainer.kept
        return None if found is None else found.timeline

    def held_bytes(self) -> dict[str, NDArray[np.float64]]:
        """Return the bytes that each stage holds for one micro-batch, from the profile; zeros without a profile."""
        predicted = self.predicted()
        if predicted is None and self.larger_micro_batches is not None:  # half the samples need half the bytes
            return {name: held / 2 for name, held in self.larger_micro_batches.held_bytes().items()}
        none = np.zeros(self.plan.schedule.num_stages)
        names = ("saved_bytes", "pending_bytes", "input_bytes")
        return {name: none if predicted is None else getattr(predicted, name) for name in names}

    def split(self) -> Chain:
        """Cut the model into stages; a stage that is recomputed in part becomes a compound stage."""
        cuts, recomputed = self.plan.cuts, self.plan.recomputed
        if recomputed is None or not any(recomputed):
            return self.captured.split(cuts)
        bounds = {bound for runs in recomputed for run in runs for bound in (run.start, run.stop)}
        inner = sorted((bounds | set(cuts)) - {0, len(self.captured.graph.nodes)})
        starts = [0, *inner]
        groups = [
            [number for number, start in enumerate(starts) if start in nodes]
            for nodes in self.captured.graph.stages(cuts)
        ]
        again = {run.start for runs in recomputed for run in runs}
        numbers = {number for number, start in enumerate(starts) if start in again}
        return compound_chain(self.captured.split(inner), groups, numbers)


def plan_model(
    request: Request,
    check: Callable[[Captured, Schedule], None],
    group: LaneGroup | None = None,
    *,
    measures: bool = False,
) -> PlannedModel:
    """Capture the model, and choose cuts and a schedule; if there is nothing to choose, nothing is measured.

    Under torchrun, every process captures the model, and the first process chooses for all.

    Args:
        request: the user's arguments.
        check: called with the captured model and a schedule before anything is measured; raises if micro-batches would
            not give the result of the whole batch.
        group: the lanes; None if nothing will run.
        measures: whether to measure in any case, so that the plan has an explanation.

    Raises:
        UsageError: if a given plan does not fit the model.
    """
    call, batch_size = request.read()
    cut_request = request.cut_request(batch_size)
    first = cut_request.check()
    captured = _captured(request, call, first)
    try:
        check(captured, first)
    except OnlyWholeError as error:
        if request.micro_batches is not None or isinstance(request.schedule, Schedule) or _is_file(request.schedule):
            raise
        request = replace(request, micro_batches=1)
        call, batch_size = request.read()
        cut_request = request.cut_request(batch_size)
        first = cut_request.check()
        if request.split is not None:  # the example must be captured whole, not as its first micro-batch
            captured = _captured(request, call, first)
        warn_user(f"only one micro-batch per step runs, so the lanes work one after another: {error}")
    explainer = _Explainer(request, captured, cut_request, batch_size)
    asked = fingerprint_of(request, captured, first)

    def choose() -> Plan:
        if isinstance(request.plan, Plan):
            if faults := request.plan.faults_for(asked, captured.graph):
                raise UsageError(f"plan: {'; '.join(faults)}; make a plan for this model: penstock.plan(model, ...)")
            return request.plan
        if request.plan is not None and (kept := reusable_plan(plan_path(request.plan), asked, captured, first)):
            return kept
        only = None if measures else _only_cuts(cut_request, first, captured)
        if only is not None:
            captured.graph.check_cuts(only)
            cuts, schedule = only, first
        else:
            found = explainer.explain()
            cuts, schedule = found.partition.cuts, found.schedule
        return Plan(
            schedule,
            tuple(cuts),
            keep=request.keep_policies,
            recomputed=_recomputed(request, explainer, cuts, schedule),
            capture_path=captured.path,
            asked=asked,
            explanation=explainer.kept,
            is_for_costs=cut_request.is_made_for_costs,
        )

    chosen: list[Plan] = []  # filled if this process chooses

    def send() -> dict[str, Any]:
        chosen.append(choose())
        return replace(chosen[0], explanation=None).to_dict() | {"source": chosen[0].source}

    if group is None or len(group.lanes) == first.num_lanes:
        plan = choose()
    else:  # the profile is not sent; explain() measures again in other processes
        found = group.control.decide(send, _settings(request, captured, first))
        plan = Plan.from_dict(found, source=found["source"])
        plan = replace(plan, explanation=chosen[0].explanation) if chosen else plan
    planned = PlannedModel(captured, plan, explainer)
    return replace(planned, smaller_micro_batches=partial(_with_smaller_micro_batches, planned, request, batch_size))


def _recomputed(
    request: Request, explainer: _Explainer, cuts: Sequence[int], schedule: Schedule
) -> tuple[tuple[range, ...], ...] | None:
    """Return the nodes of each stage that `keep="fit"` recomputes; None for other policies."""
    if request.keep != CHOSEN_BY_NODE:
        return None
    assert request.memory_limit is not None
    runs = select_recomputed(explainer.explain().profile, cuts, schedule, request.memory_limit)
    return tuple(tuple(stage) for stage in runs)


def _captured(request: Request, call: Call, schedule: Schedule) -> Captured:
    if request.captured is not None:
        return request.captured
    (request.progress or _ignore_progress)("capture", 0, 1)
    return capture(
        request.model,
        _on_model_device(call, request.model),
        training=True,
        path="replay" if request.split is not None and request.capture_path == "auto" else request.capture_path,
        num_stages=schedule.num_stages,
    )


def _with_smaller_micro_batches(planned: PlannedModel, request: Request, batch_size: int) -> PlannedModel | None:
    """Return a plan with twice as many micro-batches; None if its schedule cannot be built by name.

    The processes do not communicate here: all of them get the same result.
    """
    schedule = planned.plan.schedule
    if isinstance(request.plan, Plan) and not planned.plan.is_for_costs:
        # the schedule was built by name, and can be built again
        request = replace(request, schedule=planned.plan.asked.get("schedule", ""), plan=None)
    if not isinstance(request.schedule, str) or _is_file(request.schedule) or request.split is not None:
        return None
    if schedule.num_mbs == 1:  # two were never checked; perhaps only one is exact
        return None
    # a given profile is of larger micro-batches
    request = replace(request, micro_batches=2 * schedule.num_mbs, cuts=planned.plan.cuts, profile=None)
    try:  # some schedules cannot be built for some numbers
        cut_request = request.cut_request(batch_size)
        if cut_request.is_made_for_costs:
            return None
        twice = cut_request.check()
    except PenstockError:
        return None
    explainer = _Explainer(request, planned.captured, cut_request, batch_size)
    plan = replace(planned.plan, schedule=twice, explanation=None)
    finer = PlannedModel(planned.captured, plan, explainer, larger_micro_batches=planned)
    return replace(finer, smaller_micro_batches=partial(_with_smaller_micro_batches, finer, request, batch_size))


def _is_file(schedule: object) -> TypeGuard[str | PathLike[str]]:
    return isinstance(schedule, PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv"))


class _Explainer:
    """Makes the explanation of a plan on first use, and profiles the model for it."""

    def __init__(self, request: Request, captured: Captured, cut_request: CutRequest, batch_size: int) -> None:
        self._request, self._captured, self._cut_request = request, captured, cut_request
        self._size = -(-batch_size // min(batch_size, cut_request.first().num_mbs))
        if request.split is not None:
            self._size = captured.call.batch_size
        self.kept: Explanation | None = request.plan.explanation if isinstance(request.plan, Plan) else None

    def explain(self) -> Explanation:
        if self.kept is None:
            request = self._request
            rates, given = request.analytic, request.profile
            is_measured = rates is None and given is None
            source = ProfileSource(given, rates, device=request.device if is_measured else None, batch_size=self._size)
            source.check()
            tell = request.progress or _ignore_progress
            with with_threads(request.num_threads):
                profile = source.profile_of(self._captured, tell)
            tell("cut and schedule", 0, 1)
            name = name_of(request.model)
            found = explanation_of(name, request.model, self._captured, profile, self._cut_request)
            if isinstance(request.split, PackedSplit):
                found = replace(found, notes=(*found.notes, f"packed images: cut {request.split.words}"))
            self.kept = found
        return self.kept


def _ignore_progress(what: str, done: int, total: int) -> None:
    """Do nothing; used if the user passed no progress function."""


def _settings(request: Request, captured: Captured, schedule: Schedule) -> dict[str, Any]:
    """Return the settings that must be the same in all processes."""
    nodes = "\n".join(f"{node.name} {node.op} {node.module}" for node in captured.graph.nodes)
    return {
        "schedule": schedule.name,
        "micro_batches": schedule.num_mbs,
        "stages": schedule.num_stages,
        "keep": str(request.keep),
        "cuts": str(request.cuts),
        "memory_limit": str(request.memory_limit),
        "penstock": __version__,
        "torch": torch.__version__,
        "random seed (torch.initial_seed)": torch.initial_seed(),  # otherwise loaders would shuffle differently
        "capture": captured.path,
        "nodes of the model": len(captured.graph.nodes),
        "the model": hashlib.sha256(nodes.encode()).hexdigest()[:16],
        "the example": str(
            [(n, str(t.dtype), tuple(t.shape)) for n, t in zip(captured.call.names, captured.call.tensors, strict=True)]
        ),
    }


def _only_cuts(cut_request: CutRequest, schedule: Schedule, captured: Captured) -> tuple[int, ...] | None:
    """Return the cuts if there is no choice and the schedule needs no costs; otherwise None."""
    if cut_request.is_made_for_costs:
        return None
    if len(cut_request.cuts) == schedule.num_stages - 1 and all(isinstance(cut, int) for cut in cut_request.cuts):
        return tuple(int(cut) for cut in cut_request.cuts)
    is_forced = captured.path == "direct" and len(captured.graph.nodes) == schedule.num_stages
    if is_forced or schedule.num_stages == 1:
        # raises for cuts that the model does not have
        find_places(captured.graph, schedule.num_stages, cut_request.cuts, ())
        return tuple(range(1, schedule.num_stages))
    return None


def _on_model_device(call: Call, model: nn.Module | Sequence[nn.Module]) -> Call:
    """Return a call with its tensors on the model's device, even meta; unchanged if the model is on several devices.

    The example may come from a loader, or from the GPU to which the model will move.
    """
    modules = [model] if isinstance(model, nn.Module) else list(model)
    devices = {p.device for module in modules if isinstance(module, nn.Module) for p in module.parameters()}
    if len(devices) != 1:
        return call
    (device,) = devices
    return call.map(lambda t: t if t.device == device else t.detach().to(device).requires_grad_(t.requires_grad))


def _first_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module | None:
    if isinstance(model, nn.Module):
        return model
    return model[0] if isinstance(model, (list, tuple)) and model and isinstance(model[0], nn.Module) else None
