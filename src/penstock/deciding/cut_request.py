"""Decide: from a captured model and what is asked for to a profile, cuts, a schedule and the predicted step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from penstock.deciding.defaults import EXPLORED_LANES, EXPLORED_MICRO_BATCHES

if TYPE_CHECKING:
    from torch import device as Device  # noqa: N812
    from torch import nn

    from penstock.model.capture.capture import Captured
    from penstock.model.profile import Profile
    from penstock.model.profiling.device_rates import Rates
    from penstock.planning.cluster import Cluster
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import Limit
    from penstock.planning.partition.partition import Partition
    from penstock.report.timeline import Timeline
    from penstock.schedule.schedule import Schedule

    Model = nn.Module | Sequence[nn.Module]

__all__ = ["CutRequest", "ProfileSource", "Progress", "explanation_of", "name_of"]

Progress = Callable[[str, int, int], None]

_ROUNDS = 3  # of cutting, and building a schedule for what came out


@dataclass(frozen=True)
class ProfileSource:
    """Where the profile comes from: a file or an earlier one, a count, or a measurement."""

    given: Profile | str | PathLike[str] | None
    rates: Rates | str | None
    device: Device | str | None
    batch_size: int | None

    def check(self) -> None:
        """Say, before the long work, what can be seen to be wrong."""
        from penstock.errors import UsageError
        from penstock.model.profiling.device_rates import Rates
        from penstock.schedule.counts import check_count

        if self.device is not None and (self.rates is not None or self.given is not None):
            raise UsageError("device: is for measuring; leave it out with analytic or a profile that is there")
        if self.rates is not None and self.given is not None:
            raise UsageError("analytic: counts anew, and a profile is given; leave one of them out")
        if isinstance(self.rates, str):
            Rates.of(self.rates)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, 1 << 40)

    def profile_of(self, captured: Captured, tell: Progress) -> Profile:
        """Return what each node takes."""
        from penstock.model.profiling.analytic import analytic
        from penstock.model.profiling.measure import measure

        def on_node(done: int, total: int, name: str) -> None:  # noqa: ARG001
            tell("profile", done, total)

        if self.given is not None:
            return self._checked(captured)
        if self.rates is not None:
            return analytic(captured, rates=self.rates, batch_size=self.batch_size, progress=on_node)
        return measure(captured, device=self.device, batch_size=self.batch_size, progress=on_node)

    def _checked(self, captured: Captured) -> Profile:
        """Return the profile that is there, if it is one of this graph."""
        from penstock.errors import UsageError
        from penstock.model.profile import Profile

        assert self.given is not None
        found = self.given if isinstance(self.given, Profile) else Profile.load(self.given, captured.graph)
        if found.graph.nodes != captured.graph.nodes:
            raise UsageError("profile: is one of another graph; profile the model again")
        if self.batch_size is not None and self.batch_size != found.batch_size:
            raise UsageError(
                f"batch_size: {self.batch_size}, but the profile was made for {found.batch_size}; profile again"
            )
        return found


@dataclass(frozen=True)
class CutRequest:
    """What is asked for: a schedule, and where it may be cut for it."""

    schedule: str | Schedule
    lanes: int | None
    micro_batches: int | None
    stages_per_lane: int | None
    cuts: tuple[int | str, ...]
    keep: str
    memory_limit: Limit | None
    cluster: Cluster | None

    def check(self) -> Schedule:
        """Say, before the long work, what can be seen to be wrong; return the schedule before costs are known."""
        from penstock.errors import UsageError, nearest
        from penstock.planning.cluster import Cluster
        from penstock.planning.memory_limits import limit_per_lane
        from penstock.schedule.keep_policies import PLANNED

        if self.keep not in PLANNED:
            hint = nearest(str(self.keep), PLANNED)
            raise UsageError(f"keep: {self.keep!r} is not one of {', '.join(PLANNED)}.{hint}")
        if self.cluster is not None and not isinstance(self.cluster, Cluster):
            raise UsageError(f"cluster: give a penstock.Cluster; given: {type(self.cluster).__name__}")
        schedule = self.first()
        limit_per_lane(self.memory_limit, schedule.num_lanes)
        (self.cluster or Cluster()).speeds(schedule.num_lanes)
        return schedule

    def first(self, lanes: int | None = None) -> Schedule:
        """Return the schedule before costs are known: where its stages live, and how many micro-batches they hold."""
        from penstock.errors import UsageError
        from penstock.schedule.schedule import Schedule
        from penstock.schedules import build, describe

        if isinstance(self.schedule, Schedule):
            given = {"lanes": self.lanes, "micro_batches": self.micro_batches, "stages_per_lane": self.stages_per_lane}
            if unused := [name for name, value in given.items() if value is not None]:
                raise UsageError(f"a schedule has its own counts: leave out {', '.join(unused)}")
            return self.schedule
        name, stages = self.schedule, self.stages_per_lane
        if describe(name).name == "auto":  # any with as many stages a lane: where they live is all that counts
            name, stages = ("1f1b", None) if stages in (None, 1) else ("interleaved_1f1b", stages)
        return build(name, lanes=lanes or self.num_lanes, micro_batches=self.num_mbs, stages_per_lane=stages)

    @property
    def num_lanes(self) -> int:
        """How many lanes, also where nothing is said."""
        return EXPLORED_LANES if self.lanes is None else self.lanes

    @property
    def num_mbs(self) -> int:
        """How many micro-batches, also where nothing is said."""
        return EXPLORED_MICRO_BATCHES if self.micro_batches is None else self.micro_batches

    @property
    def is_made_for_costs(self) -> bool:
        """Does the schedule follow from costs?"""
        from penstock.schedules import describe

        return isinstance(self.schedule, str) and "costs" in describe(self.schedule).options

    def decide(self, profile: Profile) -> tuple[Partition, Schedule, Timeline]:
        """Return the cuts, the schedule and the predicted step; auto takes the shorter of one and two stages a lane."""
        from penstock.errors import PenstockError
        from penstock.schedules import describe

        is_open = isinstance(self.schedule, str) and describe(self.schedule).name == "auto" and not self.stages_per_lane
        if not is_open or self.cuts:
            return self._decide(profile)
        found = [replace(self, stages_per_lane=1)._decide(profile)]
        with suppress(PenstockError):  # too many stages for the model, or for its memory
            found.append(replace(self, stages_per_lane=2)._decide(profile))
        return min(found, key=lambda decision: decision[2].step_seconds)

    def _decide(self, profile: Profile) -> tuple[Partition, Schedule, Timeline]:
        """Return cuts and schedule. One that is made for costs is made for those of the cuts, in turn."""
        schedule = self.first()
        cuts = self._cut(profile, schedule)
        for _ in range(_ROUNDS if self.is_made_for_costs else 0):
            schedule = self._build(profile, cuts)
            before, cuts = cuts, self._cut(profile, schedule)
            if cuts.cuts == before.cuts:
                break
        return cuts, schedule, self._step(profile, schedule, cuts)

    def _step(self, profile: Profile, schedule: Schedule, cuts: Partition) -> Timeline:
        from penstock.planning.simulate import simulate

        keep: Any = self.keep  # checked by the partition
        return simulate(schedule, profile.costs(cuts.cuts), cluster=self.cluster, keep=keep)

    def _cut(self, profile: Profile, schedule: Schedule) -> Partition:
        """Return the cuts that balance the lanes; where these have several stages, even ones if their step is shorter.

        Lanes in balance do not make a short step when their stages are uneven: the pipeline fills and drains by stages.
        """
        from penstock.errors import PartitionError
        from penstock.planning.partition.partition import partition

        balanced = self._partition(profile, schedule, self.cuts)
        if self.cuts or not (schedule.num_stages > schedule.num_lanes or schedule.is_bidirectional):
            return balanced
        found = [balanced]
        with suppress(PartitionError):  # even stages do not fit the memory
            even = partition(profile, stages=schedule.num_stages, transfers="hidden").cuts
            found.append(self._partition(profile, schedule, even))
        return min(found, key=lambda cuts: self._step(profile, schedule, cuts).step_seconds)

    def _partition(self, profile: Profile, schedule: Schedule, cuts: Sequence[int | str]) -> Partition:
        from penstock.planning.partition.partition import partition
        from penstock.schedule.schedule import Schedule

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
        from penstock.schedules import build, describe

        assert isinstance(self.schedule, str)
        options: dict[str, Any] = {}
        if describe(self.schedule).name == "auto":
            options["two_ways"] = False  # a stage on two lanes would need other cuts
            if self.memory_limit is not None and self.keep == "hold":
                options["memory_limit"] = self._left(profile, cuts)
        return build(
            self.schedule,
            lanes=self.num_lanes,
            micro_batches=self.num_mbs,
            stages_per_lane=self.stages_per_lane,
            costs=profile.costs(cuts.cuts),
            **options,
        )

    def _left(self, profile: Profile, cuts: Partition) -> list[float]:
        """Return what weights, gradients and optimizer state leave of each lane's memory."""
        from penstock.planning.memory_limits import limit_per_lane

        ranges = profile.graph.stages(cuts.cuts)
        nodes_of: list[list[int]] = [[] for _ in range(self.num_lanes)]
        for stage, lane in enumerate(cuts.lane_of):
            nodes_of[lane] += ranges[stage]
        limits = limit_per_lane(self.memory_limit, self.num_lanes)
        return [float(limit) - profile.state_bytes(nodes) for limit, nodes in zip(limits, nodes_of, strict=True)]


def explanation_of(name: str, model: Model, captured: Captured, profile: Profile, ask: CutRequest) -> Explanation:
    """Cut and schedule a model as asked, and tell the whole of it."""
    from torch import nn

    from penstock.model.capture.capture import plain_module
    from penstock.model.parameters import held_tensors
    from penstock.planning.explain.explanation import Explanation
    from penstock.planning.memory_limits import limit_per_lane

    cuts, schedule, timeline = ask.decide(profile)
    limits = None if ask.memory_limit is None else limit_per_lane(ask.memory_limit, schedule.num_lanes)
    module = plain_module(model) if isinstance(model, nn.Module) else nn.ModuleList(model)
    return Explanation(
        model=name,
        path=captured.path,
        reason=captured.reason,
        profile=profile,
        partition=cuts,
        schedule=schedule,
        timeline=timeline,
        keep=ask.keep,
        memory_limit=limits,
        cluster=ask.cluster,
        num_given_cuts=len(ask.cuts),
        num_elements_of={name: tensor.numel() for name, tensor in held_tensors(module).items()},
        notes=_batch_norm_note(module, int(profile.batch_size), schedule.num_mbs),
    )


def _batch_norm_note(module: nn.Module, size: int, num_mbs: int) -> tuple[str, ...]:
    """Say what batch norm sees: it is the one layer whose results follow the micro-batches."""
    from torch.nn.modules.batchnorm import _BatchNorm

    count = sum(isinstance(layer, _BatchNorm) for layer in module.modules())
    if not count or num_mbs == 1:
        return ()
    layers = "layer normalises" if count == 1 else "layers normalise"
    return (
        f"batch norm: {count} {layers} each micro-batch of {size} samples by its own mean and variance, as gradient "
        "accumulation does; the plain model takes those of the whole batch. deferred_batch_norm=True keeps running "
        "statistics of the whole batch",
    )


def name_of(model: Model) -> str:
    """Return what to call a model in tables."""
    return type(model).__name__ if hasattr(model, "forward") else "stage modules"
