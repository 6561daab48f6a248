"""Cut problem: the costs of cuts at the possible positions: seconds of lanes and wires, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from penstock.model.profile import Profile
from penstock.planning.cluster import Cluster
from penstock.planning.partition.one_stage_per_lane import Chain, longest_mean
from penstock.planning.partition.partition_memory import LaneMemory, Span
from penstock.schedule.actions import Floats, Positions
from penstock.schedule.keep_policies import POLICIES

Transfers = Literal["waited", "hidden"]
Wire = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """The problem to minimise. Cuts are indices into `positions`; stage s lies between cut s - 1 and cut s."""

    profile: Profile
    positions: Positions  # the possible positions of cuts, and both ends of the graph
    forced: frozenset[int]  # indices of the positions that must have a cut
    ways: tuple[tuple[int, ...], ...]  # for each way, the lane of each stage
    shares: tuple[float, ...]  # the share of the micro-batches that takes each way
    num_lanes: int
    cluster: Cluster  # speeds and links of the lanes
    transfers: Transfers  # whether lanes wait for each other's transfers
    keep: str  # "hold", "recompute" or "except_last"
    memory: LaneMemory | None = None  # the memory of lanes; None: no limit

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.ways[0])

    @cached_property
    def speeds(self) -> Floats:
        """The speed of each lane."""
        return self.cluster.speeds(self.num_lanes)

    @cached_property
    def seconds(self) -> Floats:
        """Running sum of the time of one micro-batch at speed 1; recomputing runs the forward twice."""
        profile = self.profile
        each = profile.forward * (2 if POLICIES[self.keep].recomputes else 1) + profile.input_grad + profile.weight_grad
        return np.concatenate([[0.0], np.cumsum(each)])[self.positions]

    @cached_property
    def width(self) -> Floats:
        """Bytes of values that cross each position in the forward."""
        return self.profile.crossing_bytes[self.positions]

    @cached_property
    def grad_width(self) -> Floats:
        """Bytes of gradients that cross each position in the backward."""
        return self.profile.crossing_grad_bytes[self.positions]

    def share_of(self, stage: int) -> dict[int, float]:
        """Return the lanes of a stage, with the share of the micro-batches that each lane runs."""
        found: dict[int, float] = {}
        for way, share in zip(self.ways, self.shares, strict=True):
            found[way[stage]] = found.get(way[stage], 0.0) + share
        return found

    def hops(self, cut: int) -> list[tuple[int, int, float]]:
        """Return (from lane, to lane, share of the micro-batches) for a cut, except within one lane."""
        return [
            (way[cut], way[cut + 1], share)
            for way, share in zip(self.ways, self.shares, strict=True)
            if way[cut] != way[cut + 1] and share > 0
        ]

    def trip(self, source: int, target: int) -> Floats:
        """Return the round-trip time at each position: values forward and their gradients back."""
        there, back = self.cluster.between(source, target), self.cluster.between(target, source)
        on_wire = self.width / there.bytes_per_second + self.grad_width / back.bytes_per_second
        return on_wire + (there.latency_seconds + back.latency_seconds)

    @cached_property
    def trips(self) -> Floats:
        """[cuts, positions] round-trip times, weighted by the share of micro-batches of each hop."""
        found = np.zeros((self.num_stages - 1, len(self.positions)))
        for cut in range(self.num_stages - 1):
            for source, target, share in self.hops(cut):
                found[cut] += share * self.trip(source, target)
        return found

    @cached_property
    def wires(self) -> tuple[dict[Wire, tuple[float, float]], ...]:
        """The wires of each cut, with seconds per byte of values forward and per byte of gradients back."""
        found: list[dict[Wire, tuple[float, float]]] = []
        for cut in range(self.num_stages - 1):
            used: dict[Wire, tuple[float, float]] = {}
            for source, target, share in self.hops(cut):
                for ends, column in (((source, target), 0), ((target, source), 1)):
                    link = self.cluster.between(*ends)
                    wire: Wire = ("wire", link.shared_as) if link.shared_as else ("link", *ends)
                    rates = list(used.get(wire, (0.0, 0.0)))
                    rates[column] += share / link.bytes_per_second
                    used[wire] = (rates[0], rates[1])
            found.append({wire: rates for wire, rates in used.items() if rates != (0.0, 0.0)})
        return tuple(found)

    @cached_property
    def wire_names(self) -> tuple[Wire, ...]:
        """All wires, in the order of the cuts that use them."""
        return tuple(dict.fromkeys(wire for used in self.wires for wire in used))

    @cached_property
    def is_chain(self) -> bool:
        """Whether each lane has one stage and each cut its own wires, so that the exact sweeps apply."""
        has_one = len(self.ways) == 1 and len(set(self.ways[0])) == self.num_stages
        return has_one and (self.transfers == "waited" or sum(map(len, self.wires)) == len(self.wire_names))

    @cached_property
    def waits_in_chain(self) -> bool:
        """Whether the problem is a chain whose neighbours wait for each other's transfers."""
        return self.is_chain and self.transfers == "waited"

    @cached_property
    def until_forced(self) -> Positions:
        """For each position, the next forced cut or the end; no stage may extend beyond it."""
        marks = np.array(sorted({*self.forced, len(self.positions) - 1}))
        here = np.minimum(np.searchsorted(marks, np.arange(len(self.positions)), side="right"), len(marks) - 1)
        return marks[here]

    def spans(self, cuts: Sequence[int]) -> list[Span]:
        """Return the first and last position of each stage."""
        return list(pairwise([0, *cuts, len(self.positions) - 1]))

    def stage_seconds(self, cuts: Sequence[int]) -> Floats:
        """Return the compute time of each stage for one micro-batch, on its slowest lane."""
        slowest = np.array([min(self.speeds[lane] for lane in self.share_of(s)) for s in range(self.num_stages)])
        work = np.array([self.seconds[b] - self.seconds[a] for a, b in self.spans(cuts)])
        return np.asarray(work / slowest)

    def lane_seconds(self, cuts: Sequence[int]) -> Floats:
        """Return the compute time of each lane for one micro-batch."""
        found = np.zeros(self.num_lanes)
        for stage, (a, b) in enumerate(self.spans(cuts)):
            for lane, share in self.share_of(stage).items():
                found[lane] += share * (self.seconds[b] - self.seconds[a]) / self.speeds[lane]
        return found

    def wire_seconds(self, cuts: Sequence[int]) -> Floats:
        """Return how long each wire is busy with one micro-batch."""
        found = dict.fromkeys(self.wire_names, 0.0)
        for used, at in zip(self.wires, cuts, strict=True):
            for wire, (there, back) in used.items():
                found[wire] += there * self.width[at] + back * self.grad_width[at]
        return np.array(list(found.values()))

    def period(self, cuts: Sequence[int]) -> float:
        """Return the objective: the time of one micro-batch in the steady state. See docs/design/partition.md."""
        if self.waits_in_chain:
            busy = [float(self.floor[cut, at]) for cut, at in enumerate(cuts)]
            order = self.lane_seconds(cuts)[list(self.ways[0])]
            return max([longest_mean(order, self.trips[np.arange(len(cuts)), list(cuts)]), *busy])
        wires: list[float] = self.wire_seconds(cuts).tolist()
        return max([float(self.lane_loads(cuts).max()), *wires])

    def lane_loads(self, cuts: Sequence[int]) -> Floats:
        """Return the compute time of each lane; if transfers are waited for, add half of those at its stages."""
        lanes = self.lane_seconds(cuts)
        if self.transfers == "waited":
            for cut, at in enumerate(cuts):
                for source, target, share in self.hops(cut):
                    lanes[[source, target]] += share * self.trip(source, target)[at] / 2
        return lanes

    @cached_property
    def floor(self) -> Floats:
        """[cuts, positions] how long the busiest wire of a cut is busy."""
        found = np.zeros((self.num_stages - 1, len(self.positions)))
        for cut, used in enumerate(self.wires):
            for there, back in used.values():
                found[cut] = np.maximum(found[cut], there * self.width + back * self.grad_width)
        return found

    def fits(self, cuts: Sequence[int]) -> bool:
        """Return whether all lanes stay within their memory limits and all forced cuts are used."""
        has_forced = set(self.forced) <= set(cuts)
        return has_forced and (self.memory is None or not self.memory.excess(self.spans(cuts)).any())

    def chain(self) -> Chain:
        """Return the problem as a chain; only if `is_chain`."""
        lanes, num_stages, num_positions = list(self.ways[0]), self.num_stages, len(self.positions)
        ride = np.concatenate([np.zeros((1, num_positions)), self.trips]) if self.waits_in_chain else None
        has_floor = any(self.wires)
        return Chain(
            seconds=self.seconds,
            width=self.width,
            first=0,
            last=num_positions - 1,
            speed=self.speeds[lanes],
            base=np.zeros(num_stages),
            ride=ride,
            floor=np.concatenate([self.floor, np.zeros((1, num_positions))]) if has_floor else None,
            furthest=self.furthest(),
        )

    def furthest(self) -> Positions | None:
        """[stages, positions] the last possible end of a stage that is alone on its lane; None: no restriction."""
        if self.memory is None and not self.forced:
            return None
        found = np.broadcast_to(self.until_forced, (self.num_stages, len(self.positions))).copy()
        if self.memory is not None:
            for stage in range(self.num_stages):
                for lane in self.share_of(stage):
                    np.minimum(found[stage], self.memory.furthest(lane, stage, {}), out=found[stage])
        return found
