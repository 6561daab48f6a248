"""Explanation: the decisions for a model and their reasons: capture, stages, cuts, memory and the predicted step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

import numpy as np

from penstock.model.graph import Graph, graph_of
from penstock.model.profile import Profile
from penstock.planning.cluster import Cluster
from penstock.planning.explain.stage_modules import module_parts, shorten
from penstock.planning.partition.partition import Partition, partition, partition_of
from penstock.planning.partition.partition_memory import Holding, holdings_of
from penstock.planning.simulate import simulate
from penstock.report.timeline import Timeline
from penstock.schedule.schedule import Schedule


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut."""

    name: str
    shape: str  # its shape as a function of the batch, such as `float32[batch, 128, 768]`
    num_bytes: int  # its bytes for one micro-batch
    source: int  # the stage that makes it
    targets: tuple[int, ...]  # the stages that use it
    is_output: bool = False  # whether the model returns it
    has_grad: bool = False  # whether its gradient is sent back
    is_dynamic: bool = False  # whether its shape depends on data; then `shape` is that of the example

    def skips_at(self, cut: int) -> bool:
        """Whether it crosses the cut after a stage without being used by the next stage."""
        return self.source < cut or cut + 1 not in self.targets


@dataclass(frozen=True)
class StageRow:
    """A stage: its modules, its costs for one micro-batch, its memory, and the values that cross the cut after it."""

    index: int
    lanes: tuple[int, ...]  # the lanes of the stage; two in a bidirectional schedule
    first_node: int
    num_nodes: int
    modules: tuple[str, ...]  # paths of the modules that it covers
    modules_text: str  # the same as a short text
    num_parameters: int  # number of elements of its parameters
    share: float  # its share of the time of all stages
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    weight_bytes: float  # bytes of parameters and buffers
    grad_bytes: float  # bytes of gradients
    optimizer_bytes: float  # bytes of optimizer state
    saved_bytes: float  # peak bytes of values saved for the backward, for all micro-batches in flight
    crossing: tuple[Crossing, ...] = ()  # values that cross the cut after it; empty for the last stage

    @property
    def backward_seconds(self) -> float:
        """Time of both gradients."""
        return self.input_grad_seconds + self.weight_grad_seconds

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the stage."""
        return self.weight_bytes + self.grad_bytes + self.optimizer_bytes + self.saved_bytes

    @property
    def crossing_bytes(self) -> int:
        """Bytes that cross the cut after it, for one micro-batch."""
        return sum(value.num_bytes for value in self.crossing)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        return asdict(self) | {
            name: getattr(self, name) for name in ("backward_seconds", "memory_bytes", "crossing_bytes")
        }


@dataclass(frozen=True)
class LaneRow:
    """A lane: its stages, its compute time for one micro-batch, its peak memory and limit, and its bubble."""

    index: int
    stages: tuple[int, ...]
    seconds: float
    num_bytes: float
    limit_bytes: float | None
    bubble: float


@dataclass(frozen=True)
class Tie:
    """A parameter with several names, or one that several stages use; each of these stages holds it."""

    name: str
    aliases: tuple[str, ...]
    stages: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """The decisions for a model. `print` shows the tables; `to_json` and `to_html` write them.

    Attributes:
        model: the name of the model.
        path: how the model was captured: "direct", "export" or "replay".
        reason: the reason for this path.
        profile: the costs of each node; its graph is the captured graph.
        partition: the cuts.
        schedule: what the lanes run.
        timeline: the predicted step.
        keep: what stages do with saved values.
        memory_limit: limit of each lane in bytes; None: no limit.
        num_given_cuts: number of cuts that the user requested.
        num_elements_of: number of elements of each parameter.
        notes: further remarks, one sentence each.
        cluster: speeds and links of the lanes; None: transfers take no time.
    """

    model: str
    path: str
    reason: str
    profile: Profile
    partition: Partition
    schedule: Schedule
    timeline: Timeline
    keep: str = "hold"
    memory_limit: tuple[float, ...] | None = None
    num_given_cuts: int = 0
    num_elements_of: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cluster: Cluster | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return all fields as plain data for JSON; `from_plain` reads them."""
        return {
            "model": self.model,
            "path": self.path,
            "reason": self.reason,
            "graph": asdict(self.graph) | {"uncuttable": sorted(self.graph.uncuttable)},
            "profile": self.profile.to_plain(),
            "partition": asdict(self.partition),
            "keep": self.keep,
            "memory_limit": self.memory_limit,
            "num_given_cuts": self.num_given_cuts,
            "num_elements_of": dict(self.num_elements_of),
            "notes": list(self.notes),
            "cluster": None if self.cluster is None else self.cluster.to_plain(),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], schedule: Schedule, cuts_at: Sequence[int]) -> Explanation:
        """Return the explanation that `to_plain` wrote, for a plan with the given schedule and cuts.

        If the cuts were edited since, their partition is computed again.
        """
        profile = Profile.from_plain(plain["profile"], graph_of(plain["graph"]))
        cluster = None if plain["cluster"] is None else Cluster.from_plain(plain["cluster"])
        limits = plain["memory_limit"]
        keep, cuts = plain["keep"], partition_of(plain["partition"])
        if cuts.cuts != tuple(cuts_at):
            cuts = partition(profile, schedule=schedule, cluster=cluster, keep=keep, cuts_at=cuts_at)
        return cls(
            plain["model"],
            plain["path"],
            plain["reason"],
            profile,
            cuts,
            schedule,
            simulate(schedule, profile.costs(cuts.cuts), cluster=cluster, keep=keep),
            keep=keep,
            memory_limit=None if limits is None else tuple(limits),
            num_given_cuts=plain["num_given_cuts"],
            num_elements_of=plain["num_elements_of"],
            notes=tuple(plain["notes"]),
            cluster=cluster,
        )

    @property
    def has_links(self) -> bool:
        """Whether a cluster was given; otherwise transfers take no time."""
        return self.cluster is not None

    @property
    def graph(self) -> Graph:
        """The captured model."""
        return self.profile.graph

    @property
    def balance(self) -> float:
        """The time of the slowest lane divided by the mean of all lanes; 1.0 is best."""
        lanes = self.partition.lane_seconds
        mean = sum(lanes) / len(lanes)
        return max(lanes) / mean if mean else 1.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the predicted step."""
        step = self.timeline.step_seconds
        return self.profile.batch_size * self.schedule.num_mbs / step if step else 0.0

    @property
    def speedup(self) -> float:
        """The time of all work on one lane of speed 1, divided by the time of the predicted step."""
        work = float((self.profile.forward + self.profile.input_grad + self.profile.weight_grad).sum())
        step = self.timeline.step_seconds
        return work * self.schedule.num_mbs / step if step else 1.0

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """The nodes of each stage."""
        return tuple(self.graph.stages(self.partition.cuts))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each node."""
        return tuple(stage for stage, nodes in enumerate(self.ranges) for _ in nodes)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """All values that cross a cut."""
        graph, stage_of, found = self.graph, self.stage_of, []
        for index, value in enumerate(graph.values):
            if graph.is_free(index):
                continue
            source = stage_of[value.producer]
            targets = {stage_of[user] for user in graph.users_of[index]} - {source}
            is_output = index in graph.outputs
            if not targets and not (is_output and source < len(self.ranges) - 1):
                continue
            found.append(
                Crossing(
                    name=value.name,
                    shape=str(value),
                    num_bytes=value.bytes_at(self.profile.batch_size),
                    source=source,
                    targets=tuple(sorted(targets)),
                    is_output=is_output,
                    has_grad=value.has_grad,
                    is_dynamic=value.is_dynamic,
                )
            )
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[StageRow, ...]:
        """The table of stages."""
        return tuple(self._stage(index) for index in range(len(self.ranges)))

    def _stage(self, index: int) -> StageRow:
        nodes, profile = self.ranges[index], self.profile
        here = slice(nodes.start, nodes.stop)
        seconds = [float(column[here].sum()) for column in (profile.forward, profile.input_grad, profile.weight_grad)]
        total = float((profile.forward + profile.input_grad + profile.weight_grad).sum())
        names = [name for name in self.graph.parameters_of(nodes) if not self.graph.parameters[name].is_buffer]
        parts = module_parts(self.graph, nodes)
        grads = profile.grad_bytes(nodes)
        last = len(self.ranges) - 1
        return StageRow(
            index=index,
            lanes=tuple(sorted({way[index] for way in self.schedule.ways})),
            first_node=nodes.start,
            num_nodes=len(nodes),
            modules=parts,
            modules_text=shorten(parts),
            num_parameters=sum(self.num_elements_of.get(name, 0) for name in names),
            share=sum(seconds) / total if total else 0.0,
            forward_seconds=seconds[0],
            input_grad_seconds=seconds[1],
            weight_grad_seconds=seconds[2],
            weight_bytes=profile.weight_bytes(nodes),
            grad_bytes=grads,
            optimizer_bytes=profile.optimizer_bytes * grads,
            saved_bytes=self._saved(index),
            crossing=tuple(value for value in self.crossings if _crosses(value, index, last)),
        )

    def _saved(self, stage: int) -> float:
        """Return the peak bytes of the saved values of a stage alone, on the lane where the peak is highest."""
        nodes, profile = self.ranges[stage], self.profile
        here = slice(nodes.start, nodes.stop)
        saved, pending = profile.saved_bytes[here].sum(), profile.pending_bytes[here].sum()
        each = np.array([saved, pending, profile.crossing_bytes[nodes.start]])
        counts = [h.counts[:, :, h.stages.index(stage)] for h in self._holdings if stage in h.stages]
        return float(max((count @ each).max() for count in counts))

    @cached_property
    def _holdings(self) -> tuple[Holding, ...]:
        return holdings_of(self.schedule, self.keep)

    @cached_property
    def lanes(self) -> tuple[LaneRow, ...]:
        """The table of lanes."""
        return tuple(
            LaneRow(
                index=lane,
                stages=self.schedule.stages_of(lane),
                seconds=self.partition.lane_seconds[lane],
                num_bytes=self.partition.lane_bytes[lane],
                limit_bytes=None if self.memory_limit is None else self.memory_limit[lane],
                bubble=self.timeline.lane_bubbles[lane],
            )
            for lane in range(self.schedule.num_lanes)
        )

    @cached_property
    def ties(self) -> tuple[Tie, ...]:
        """The parameters that have several names or are used by several stages."""
        users: dict[str, dict[int, None]] = {}
        for node, stage in zip(self.graph.nodes, self.stage_of, strict=True):
            for name in node.parameters:
                users.setdefault(name, {})[stage] = None
        return tuple(
            Tie(name, parameter.aliases, tuple(users.get(name, ())), parameter.num_bytes)
            for name, parameter in self.graph.parameters.items()
            if not parameter.is_buffer and (parameter.aliases or len(users.get(name, ())) > 1)
        )

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(self.num_elements_of.get(name, 0) for name, p in self.graph.parameters.items() if not p.is_buffer)

    def __repr__(self) -> str:
        return f"Explanation({self.model!r}, {len(self.ranges)} stages, step {self.timeline.step_seconds:.4g} s)"

    def __str__(self) -> str:
        return self.to_text(color=False)

    def to_text(self, *, width: int | None = None, color: bool | None = None) -> str:
        """Return the tables as text; by default with the width of the terminal, and in colour if stdout is one."""
        from penstock.planning.explain.explanation_text import draw_explanation

        return draw_explanation(self, width=width, color=color)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        profile, partition, timeline = self.profile, self.partition, self.timeline
        return {
            "model": self.model,
            "capture": {"path": self.path, "reason": self.reason},
            "nodes": len(self.graph.nodes),
            "parameters": self.num_parameters,
            "profile": {"method": profile.method, "device": profile.device, "batch_size": int(profile.batch_size)},
            "schedule": self.schedule.name,
            "keep": self.keep,
            "micro_batches": self.schedule.num_mbs,
            "cuts": list(partition.cuts),
            "stages": [stage.to_dict() for stage in self.stages],
            "lanes": [asdict(lane) for lane in self.lanes],
            "tied_parameters": [asdict(tie) for tie in self.ties],
            "balance": self.balance,
            "cuts_are_proved_best": partition.is_proved,
            "gap_to_bound": partition.gap,
            "period_seconds": partition.period_seconds,
            "step_seconds": timeline.step_seconds,
            "samples_per_second": self.samples_per_second,
            "speedup_over_one_lane": self.speedup,
            "bubble_over_makespan": timeline.bubble,
            "bubble_over_longest_lane_span": timeline.span_bubble,
            "notes": list(self.notes),
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return all figures as JSON."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def _repr_html_(self) -> str:
        """Return the page for the output of a cell in a notebook."""
        from penstock.planning.explain.explanation_page import page_of, strip_of
        from penstock.report.notebook import in_frame

        return in_frame(page_of(strip_of(self)), height=min(480 + 30 * len(self.stages), 1000))

    def to_html(self, path: str | PathLike[str]) -> None:
        """Write a self-contained page that draws the model as a strip of nodes with its cuts.

        Raises:
            OutputError: if the file cannot be written.
        """
        from penstock.planning.explain.explanation_page import strip_of, write_strip

        write_strip(strip_of(self), path)


def _crosses(value: Crossing, stage: int, last: int) -> bool:
    """Return whether a value crosses the cut after a stage; an output crosses all later cuts."""
    end = last if value.is_output else max(value.targets)
    return value.source <= stage < end
