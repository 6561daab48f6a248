"""Executor setup: makes the executors of all lanes from the stages and a schedule."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from penstock.model.stages import Chain, Stage
from penstock.runtime.backward.gradient_accumulation import GradientAccumulation
from penstock.runtime.batch_norm import DeferredStatistics
from penstock.runtime.executor import Executor
from penstock.runtime.keep.offload import HostPool
from penstock.runtime.lane_program import LaneProgram, make_program
from penstock.runtime.lanes.lane_group import LaneGroup
from penstock.runtime.stage_run import StageRun
from penstock.runtime.weight_stash import WeightVersions
from penstock.runtime.wiring import Wiring, wire
from penstock.schedule.keep_policies import Keep
from penstock.schedule.lower import Lowered, lower
from penstock.schedule.schedule import Schedule

_STATISTICS = 1 << 16  # the first exchange number of statistics; parameters have lower numbers, buffers higher ones


@dataclass
class ExecutorSetup:
    """The executors of the lanes in this process, and their parts that are the same in all steps."""

    # one chain of stages per way of the schedule. Two lanes that share a stage run copies of its program
    chains: Sequence[Chain]
    schedule: Schedule  # the schedule that the lanes run
    keep: tuple[Keep, ...]  # the keep policy of each stage
    devices: Sequence[torch.device]  # the device of each lane
    lane_group: LaneGroup  # the lanes, with the transports, the streams and the rows of those in this process
    # the optimizer of each stage, if the schedule updates weights within the step
    optimizers: Mapping[int, torch.optim.Optimizer] = field(default_factory=dict)
    # whether batch norm updates its running statistics once per step, from the whole batch
    defers_batch_norm: bool = False
    # whether the stages are compiled. If so, one lane at a time runs a forward, because the compiler works for one
    # thread at a time
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self._made: dict[tuple[bool, bool, int], list[Executor]] = {}
        self._lowered: dict[tuple[bool, int], Lowered] = {}
        self._host = {lane: HostPool() for lane in self.lane_group.transports}
        self._locks: dict[int, AbstractContextManager[Any]] = {}  # reentrant: a recompute acquires its lock twice
        self._accumulation = GradientAccumulation()
        for chain in self.chains[1:]:  # if one way replaces a buffer, all ways use the new one
            for stage in chain.stages:
                stage.held.share(self.chains[0].stages[0].held.shared)
        self._statistics: dict[tuple[int, int], DeferredStatistics] = {}
        if self.defers_batch_norm:
            for lane in self.lane_group.transports:
                for index in self.schedule.stages_of(lane):
                    statistics = DeferredStatistics(stage_on(self.chains, self.schedule, lane, index))
                    if statistics.has_any:
                        self._statistics[index, lane] = statistics

    def end_step(self, *, is_done: bool) -> None:
        """Apply the deferred statistics of batch norm once; discard them if the step failed.

        If lanes of several processes run the same stage, they exchange their statistics.
        """
        if is_done:
            for (index, lane), statistics in self._statistics.items():
                lanes = sorted({way[index] for way in self.schedule.ways})
                if not set(lanes) <= set(self.lane_group.lanes):
                    messages = self.lane_group.values.exchange(_STATISTICS + index, statistics.message(), lanes)
                    for other, message in zip(lanes, messages, strict=True):
                        if other != lane:
                            statistics.add_message(message)
        of_stage: dict[int, list[DeferredStatistics]] = {}
        for (index, _), statistics in self._statistics.items():
            of_stage.setdefault(index, []).append(statistics)
        for first, *others in of_stage.values():
            if is_done:
                first.commit(*others)
            else:
                for statistics in (first, *others):
                    statistics.reset()

    def wiring(self, training: bool) -> Wiring:
        """Return which values go from which stage to which, in training or in evaluation."""
        chain = self.chains[0]
        results = chain.results(training)
        has_rest = any(getattr(getattr(s.program, "part", None), "is_dynamic", False) for s in chain.stages)
        return wire(chain.stages, () if results.takes_all else results.names, has_rest=has_rest)

    def lowered(self, training: bool) -> Lowered:
        """Return the lowered schedule of a mode; other values may skip stages in evaluation than in training."""
        key = (training, self.chains[0].form)
        if key not in self._lowered:
            self._lowered[key] = lower(self.schedule, keep=self.keep, skips=self.wiring(training).skips)
        return self._lowered[key]

    def executors(self, *, training: bool, has_backward: bool) -> list[Executor]:
        """Return the executors of the lanes in this process, for the shapes of the last batch that was read."""
        key = (training, has_backward, self.chains[0].form)
        if key not in self._made:
            wiring, lowered = self.wiring(training), self.lowered(training)
            program_of = partial(make_program, lowered, forward_only=not has_backward)
            self._made[key] = [self._executor(lane, program_of, wiring) for lane in self.lane_group.transports]
        return self._made[key]

    def _executor(self, lane: int, program_of: Callable[[int], LaneProgram], wiring: Wiring) -> Executor:
        program = program_of(lane)
        stages = {index: stage_on(self.chains, self.schedule, lane, index) for index in self.schedule.stages_of(lane)}
        runs = {index: self._stage_run(stage, wiring, lane) for index, stage in stages.items()}
        versions = None
        if self.schedule.versions is not None:
            versions = WeightVersions(stages, self.optimizers, program.last_use)
        return Executor(
            program, runs, self.lane_group.transports[lane], self.lane_group.rows[lane],
            program_of=program_of, versions=versions, streams=self.lane_group.streams[lane],
        )  # fmt: skip

    def _stage_run(self, stage: Stage, wiring: Wiring, lane: int) -> StageRun:
        lock = None
        is_shared = len({way[stage.index] for way in self.schedule.ways}) > 1
        if self.is_compiled and len(self.lane_group.transports) > 1:
            lock = self._locks.setdefault(-1, threading.RLock())
        elif self._shares_buffers(stage):
            lock = self._locks.setdefault(-2, threading.RLock())
        elif is_shared and len(self.lane_group.transports) > 1 and any(True for _ in stage.buffers()):
            lock = self._locks.setdefault(stage.index, threading.RLock())
        return StageRun(
            stage,
            wiring,
            device=self.devices[lane],
            keep=self.keep[stage.index],
            lock=lock,
            statistics=self._statistics.get((stage.index, lane)),
            host=self._host[lane],
            accumulation=self._accumulation if self.is_compiled and self.schedule.versions is None else None,
            is_alone=not self.is_compiled or self._is_alone(stage),
        )

    def _shares_buffers(self, stage: Stage) -> bool:
        """Return whether a stage of another lane in this process changes a buffer that this stage also changes."""
        own: frozenset[str] = getattr(stage.program, "changed", frozenset())
        lanes = {way[stage.index] for way in self.schedule.ways}
        return bool(own) and any(
            own & getattr(stage_on(self.chains, self.schedule, lane, index).program, "changed", frozenset())
            for lane in self.lane_group.transports
            for index in self.schedule.stages_of(lane)
            if index != stage.index and lanes != {lane}
        )

    def _is_alone(self, stage: Stage) -> bool:
        """Return whether only one lane of this process uses the parameters of a stage."""
        return all(len(self._lanes_of[id(parameter)]) == 1 for parameter in stage.parameters())

    @cached_property
    def _lanes_of(self) -> dict[int, set[int]]:
        """For each parameter, the lanes of this process that use it."""
        found: dict[int, set[int]] = {}
        for lane in self.lane_group.transports:
            for index in self.schedule.stages_of(lane):
                for parameter in stage_on(self.chains, self.schedule, lane, index).parameters():
                    found.setdefault(id(parameter), set()).add(lane)
        return found


def stage_on(chains: Sequence[Chain], schedule: Schedule, lane: int, stage: int) -> Stage:
    """Return the copy of a stage that a lane runs."""
    way = next(w for w, lanes in enumerate(schedule.ways) if lanes[stage] == lane)
    return chains[way].stages[stage]
