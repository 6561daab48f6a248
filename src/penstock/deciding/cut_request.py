"""Cut request: from a model and the requested options to a profile, cuts, a schedule and a predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.deciding.defaults import EXPLORED_LANES, EXPLORED_MICRO_BATCHES, SCHEDULE
from penstock.errors import PartitionError, PenstockError, UsageError, nearest
from penstock.planning.cluster import Cluster
from penstock.planning.memory_limits import Limit, limit_per_lane
from penstock.planning.simulate import simulate
from penstock.schedule.counts import check_count
from penstock.schedule.keep_policies import PLANNED
from penstock.schedule.schedule import Schedule
from penstock.schedules import build, describe

if TYPE_CHECKING:
    from torch import device as Device  # noqa: N812
    from torch import nn

    from penstock.model.capture.capture import Captured
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.partition.partition import Partition
    from penstock.report.timeline import Timeline

    Model = nn.Module | Sequence[nn.Module]

Progress = Callable[[str, int, int], None]

_ROUNDS = 3  # each cuts the model and builds a schedule for the costs of these cuts


@dataclass(frozen=True)
class ProfileSource:
    """The source of the profile: a file or an earlier profile, a count, or a measurement."""

    given: Profile | str | PathLike[str] | None
    rates: Rates | str | None
    device: Device | str | None
    batch_size: int | None

    def check(self) -> None:
        """Check the arguments before the expensive work starts."""
        from penstock.model.profiling.device_rates import Rates

        if self.device is not None and (self.rates is not None or self.given is not None):
            raise UsageError("device: only applies to measuring; leave it out with analytic= or profile=")
        if self.rates is not None and self.given is not None:
            raise UsageError("analytic= and profile= exclude each other: pass one of them")
        if isinstance(self.rates, str):
            Rates.of(self.rates)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, 1 << 40)

    def profile_of(self, captured: Captured, report: Progress) -> Profile:
        """Return the costs of each node."""
        from penstock.model.profiling.analytic import analytic
        from penstock.model.profiling.measure import measure

        def on_node(done: int, total: int, name: str) -> None:  # noqa: ARG001
            report("profile", done, total)

        if self.given is not None:
            return self._checked(captured)
        if self.rates is not None:
            return analytic(captured, rates=self.rates, batch_size=self.batch_size, progress=on_node)
        return measure(captured, device=self.device, batch_size=self.batch_size, progress=on_node)

    def _checked(self, captured: Captured) -> Profile:
        """Return the given profile; refuse one of another graph or batch size."""
        from penstock.model.profile import Profile

        assert self.given is not None
        found = self.given if isinstance(self.given, Profile) else Profile.load(self.given, captured.graph)
        if found.graph.nodes != captured.graph.nodes:
            raise UsageError("profile: belongs to another graph; profile the model again")
        if self.batch_size is not None and self.batch_size != found.batch_size:
            raise UsageError(
                f"batch_size: {self.batch_size}, but the profile was made for {found.batch_size}; profile again"
            )
        return found


@dataclass(frozen=True)
class CutRequest:
    """A request for a plan: a schedule, and constraints on the cuts."""

    schedule: str | Schedule
    lanes: int | None
    micro_batches: int | None
    stages_per_lane: int | None
    cuts: tuple[int | str, ...]
    keep: str
    memory_limit: Limit | None
    cluster: Cluster | None

    def check(self) -> Schedule:
        """Check the request before the expensive work starts; return the schedule before costs are known."""
        if self.keep not in PLANNED:
            hint = nearest(str(self.keep), PLANNED)
            raise UsageError(f"keep: {self.keep!r} is not one of {', '.join(PLANNED)}.{hint}")
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise UsageError(f"cluster: pass a penstock.Cluster; given: {type(self.cluster).__name__}")
        schedule = self.first()
        limit_per_lane(self.memory_limit, schedule.num_lanes)
        (self.cluster or Cluster()).speeds(schedule.num_lanes)
        return schedule

    def first(self, lanes: int | None = None) -> Schedule:
        """Return the schedule before costs are known: the lanes of stages, and the micro-batches in flight."""
        if isinstance(self.schedule, Schedule):
            given = {"lanes": self.lanes, "micro_batches": self.micro_batches, "stages_per_lane": self.stages_per_lane}
            if unused := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"the schedule already defines its counts: leave out {', '.join(unused)}")
            return self.schedule
        name, stages = self.schedule, self.stages_per_lane
        if describe(name).name == "auto":  # any schedule with as many stages per lane: only the placement matters
            name, stages = (SCHEDULE, None) if stages in (None, 1) else ("interleaved_1f1b", stages)
        return build(name, lanes=lanes or self.num_lanes, micro_batches=self.num_mbs, stages_per_lane=stages)

    @property
    def num_lanes(self) -> int:
        """The requested number of lanes, or the default."""
        return EXPLORED_LANES if self.lanes is None else self.lanes

    @property
    def num_mbs(self) -> int:
        """The requested number of micro-batches, or the default."""
        return EXPLORED_MICRO_BATCHES if self.micro_batches is None else self.micro_batches

    @property
    def is_made_for_costs(self) -> bool:
        """Whether the schedule depends on costs."""
        return isinstance(self.schedule, str) and "costs" in describe(self.schedule).options

    def decide(self, profile: Profile) -> tuple[Partition, Schedule, Timeline]:
        """Return the cuts, the schedule and the predicted step; `auto` tries one and two stages per lane."""
        is_open = isinstance(self.schedule, str) and describe(self.schedule).name == "auto" and not self.stages_per_lane
        if not is_open or self.cuts:
            return self._decide(profile)
        found = [replace(self, stages_per_lane=1)._decide(profile)]
        with suppress(PenstockError):  # too many stages for the model, or for its memory
            found.append(replace(self, stages_per_lane=2)._decide(profile))
        return min(found, key=lambda decision: decision[2].step_seconds)

    def _decide(self, profile: Profile) -> tuple[Partition, Schedule, Timeline]:
        """Return the decision. If the schedule depends on costs, cut and build the schedule in turn."""
        schedule = self.first()
        cuts = self._cut(profile, schedule)
        for _ in range(_ROUNDS if self.is_made_for_costs else 0):
            schedule = self._build(profile, cuts)
            before, cuts = cuts, self._cut(profile, schedule)
            if cuts.cuts == before.cuts:
                break
        return cuts, schedule, self._step(profile, schedule, cuts)

    def _step(self, profile: Profile, schedule: Schedule, cuts: Partition) -> Timeline:
        keep: Any = self.keep  # checked by the partition
        return simulate(schedule, profile.costs(cuts.cuts), cluster=self.cluster, keep=keep)

    def _cut(self, profile: Profile, schedule: Schedule) -> Partition:
        """Return the cuts that balance the lanes; with several stages per lane, also try cuts that balance the stages.

        The pipeline fills and drains stage by stage, so balanced lanes with uneven stages can make a longer step.
        """
        from penstock.planning.partition.partition import partition

        balanced = self._partition(profile, schedule, self.cuts)
        if self.cuts or not (schedule.num_stages > schedule.num_lanes or schedule.is_bidirectional):
            return balanced
        found = [balanced]
        with suppress(PartitionError):  # even stages may not fit in memory
            even = partition(profile, stages=schedule.num_stages, transfers="hidden").cuts
            found.append(self._partition(profile, schedule, even))
        return min(found, key=lambda cuts: self._step(profile, schedule, cuts).step_seconds)

    def _partition(self, profile: Profile, schedule: Schedule, cuts: Sequence[int | str]) -> Partition:
        from penstock.planning.partition.partition import partition

        return partition(
            profile,
            schedule=schedule,
            cluster=self.cluster,
            memory_limit=self.memory_limit,
            keep=self.keep,
            cuts_at=cuts,
            with_lanes=None if isinstance(self.schedule, Schedule) else self.first,
        )

    def _build(self, profile: Profile, cuts: Partition) -> Schedule:
        assert isinstance(self.schedule, str)
        options: dict[str, Any] = {}
        if describe(self.schedule).name == "auto":
            options["two_ways"] = False  # a stage on two lanes would need other cuts
            if self.memory_limit is not None and self.keep == "hold":
                options["memory_limit"] = self._remaining_memory(profile, cuts)
        return build(
            self.schedule,
            lanes=self.num_lanes,
            micro_batches=self.num_mbs,
            stages_per_lane=self.stages_per_lane,
            costs=profile.costs(cuts.cuts),
            **options,
        )

    def _remaining_memory(self, profile: Profile, cuts: Partition) -> list[float]:
        """Return the memory of each lane minus its weights, gradients and optimizer state."""
        ranges = profile.graph.stages(cuts.cuts)
        nodes_of: list[list[int]] = [[] for _ in range(self.num_lanes)]
        for stage, lane in enumerate(cuts.lane_of):
            nodes_of[lane] += ranges[stage]
        limits = limit_per_lane(self.memory_limit, self.num_lanes)
        return [float(limit) - profile.state_bytes(nodes) for limit, nodes in zip(limits, nodes_of, strict=True)]


def explain(
    model: Model | str,
    example: object = None,
    *,
    lanes: int | None = None,
    micro_batches: int | None = None,
    schedule: str | Schedule = SCHEDULE,
    stages_per_lane: int | None = None,
    cuts: Sequence[int | str] = (),
    keep: str = "hold",
    memory_limit: Limit | None = None,
    cluster: Cluster | None = None,
    batch_size: int | None = None,
    training: bool | None = None,
    capture_path: str = "auto",
    device: Device | str | None = None,
    profile: Profile | str | PathLike[str] | None = None,
    analytic: Rates | str | None = None,
    optimizer_bytes: float | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Explain how a model would be cut into stages, and predict the time of a step. Nothing is trained.

    `print` the result to see the tables; it also has `to_dict`, `to_json` and `to_html`.

    Args:
        model: any module, unchanged; a list of stage modules; or a name as on the command line, such as `gpt2` or
            `package.module:callable`.
        example: the arguments of the model for one micro-batch: a tensor, a tuple of arguments or a dict of keyword
            arguments. A model given by name can have its own example.
        lanes: number of lanes; 4 by default.
        micro_batches: number of micro-batches per step; 8 by default.
        schedule: a name, or a schedule, which then defines the numbers of lanes and micro-batches.
        stages_per_lane: number of stages per lane, for schedules that leave it open.
        cuts: where cuts must lie: node numbers, or the nodes or modules after the cuts; the others are chosen.
        keep: "hold" or "recompute" the values that the forward saves; "except_last" recomputes them, except for the
            last micro-batch.
        memory_limit: bytes of each lane for weights, gradients, optimizer state and saved values, such as 16e9 or
            "16GiB"; one value for all lanes or a list.
        cluster: speeds and links of the lanes; by default all lanes are equal and transfers take no time.
        batch_size: number of samples of a micro-batch; by default that of the example.
        training: whether to capture in training mode or in evaluation mode; by default the mode of the model.
        capture_path: "direct", "export" or "replay"; "auto" takes the first that works.
        device: the device on which to measure; by default that of the model.
        profile: an existing profile or its file; then nothing is measured.
        analytic: the rates of a device, or its name: count operations and bytes instead of measuring.
        optimizer_bytes: bytes of optimizer state per byte of a parameter; by default as in the profile (2.0, for Adam).
        progress: called with the current activity, the number of units done, and their total.

    Raises:
        CaptureError: if the model cannot be captured; the message says where it stopped and what to do.
        PartitionError: if the requested cuts are impossible or no cuts fit the memory; the message says what would fit.
        UsageError: if an argument is invalid.
        ScheduleError: if the schedule does not exist or cannot be built.
    """
    request = CutRequest(
        schedule,
        lanes,
        micro_batches,
        stages_per_lane=stages_per_lane,
        cuts=tuple(cuts) if not isinstance(cuts, (str, int)) else (cuts,),
        keep=keep,
        memory_limit=memory_limit,
        cluster=cluster,
    )
    num_stages = request.check().num_stages
    source = ProfileSource(profile, analytic, device=device, batch_size=batch_size)
    source.check()
    from penstock.model.capture.capture import capture  # imports torch, so the checks come first

    report = progress or (lambda what, done, total: None)
    module, call = _model(model, example, batch_size, report)
    report("capture", 0, 1)
    captured = capture(module, call, training=training, path=capture_path, num_stages=num_stages)
    costs = source.profile_of(captured, report)
    if optimizer_bytes is not None:
        costs = replace(costs, optimizer_bytes=optimizer_bytes)
    report("cut and schedule", 0, 1)
    name = model if isinstance(model, str) else name_of(module)
    return explanation_of(name, module, captured, costs, request)


def _model(model: Model | str, example: object, batch_size: int | None, report: Progress) -> tuple[Model, object]:
    from penstock.model.small_models.named_models import load

    if isinstance(model, str):
        report("build the model", 0, 1)
        module, own = load(model, batch_size=batch_size)
        example = own if example is None else example
        if example is None:
            raise UsageError(f"{model} has no example: return a model and example arguments from it")
        return module, example
    if not hasattr(model, "forward") and not isinstance(model, (list, tuple)):
        raise UsageError(f"model: pass a torch.nn.Module, a list of them, or a name; given: {type(model).__name__}")
    if example is None:
        raise UsageError(
            "example: pass the arguments of the model: a tensor, a tuple of arguments or a dict of keywords"
        )
    return model, example


def explanation_of(name: str, model: Model, captured: Captured, profile: Profile, request: CutRequest) -> Explanation:
    """Cut and schedule a model as requested, and return the explanation."""
    from torch import nn

    from penstock.model.capture.capture import plain_module
    from penstock.model.parameters import held_tensors
    from penstock.planning.explain.explanation import Explanation

    cuts, schedule, timeline = request.decide(profile)
    limits = None if request.memory_limit is None else limit_per_lane(request.memory_limit, schedule.num_lanes)
    module = plain_module(model) if isinstance(model, nn.Module) else nn.ModuleList(model)
    return Explanation(
        model=name,
        path=captured.path,
        reason=captured.reason,
        profile=profile,
        partition=cuts,
        schedule=schedule,
        timeline=timeline,
        keep=request.keep,
        memory_limit=limits,
        cluster=request.cluster,
        num_given_cuts=len(request.cuts),
        num_elements_of={name: tensor.numel() for name, tensor in held_tensors(module).items()},
        notes=_batch_norm_note(module, int(profile.batch_size), schedule.num_mbs),
    )


def _batch_norm_note(module: nn.Module, size: int, num_mbs: int) -> tuple[str, ...]:
    """Return a note if the model has batch norm, whose results depend on the micro-batches."""
    from torch.nn.modules.batchnorm import _BatchNorm

    count = sum(isinstance(layer, _BatchNorm) for layer in module.modules())
    if not count or num_mbs == 1:
        return ()
    layers = "layer normalises" if count == 1 else "layers normalise"
    return (
        f"batch norm: {count} {layers} each micro-batch of {size} samples by its own mean and variance, as in gradient "
        "accumulation; the plain model uses those of the whole batch. With deferred_batch_norm=True, the running "
        "statistics are those of the whole batch",
    )


def name_of(model: Model) -> str:
    """Return the name of a model for tables."""
    return type(model).__name__ if hasattr(model, "forward") else "stage modules"
