"""Simulation: run a lowered schedule with costs, and return its timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ScheduleError, UsageError
from penstock.model.costs import Costs, StageCosts
from penstock.planning.cluster import Cluster, Link
from penstock.report.timeline import Timeline
from penstock.schedule.actions import KIND_INDEX, KINDS, Floats, Ints, Kind, Positions
from penstock.schedule.advance_lanes import Queues, Run, advance
from penstock.schedule.flow import NONE, Flow, pair_rows, wait_together
from penstock.schedule.keep_policies import Keep
from penstock.schedule.lower import Lowered, lower
from penstock.schedule.rules import RULES, Where, occupying
from penstock.schedule.schedule import Schedule


def simulate(
    schedule: Schedule | Lowered,
    costs: Costs | None = None,
    *,
    cluster: Cluster | None = None,
    keep: Keep | Sequence[Keep] = "hold",
    skips: Iterable[Sequence[int]] = (),
) -> Timeline:
    """Return the timeline of a step: the start and end of each action of each lane.

    Args:
        schedule: a schedule, or a lowered schedule (then leave keep and skips out).
        costs: seconds and bytes of each stage; by default F, I and W take one second each.
        cluster: device speeds and links; by default all devices have speed 1, and transfers take only the time that
            `costs` gives.
        keep: what stages do with saved values, as in `lower`.
        skips: values that skip stages, as in `lower`.

    Raises:
        ScheduleError: if the schedule deadlocks.
        CostError: if the costs or the cluster do not match the schedule.

    >>> from penstock.schedule.builders.gpipe import gpipe
    >>> simulate(gpipe(lanes=4, micro_batches=8), Costs(forward=1.0, backward=2.0)).step_seconds
    33.0
    """
    if costs is not None and not isinstance(costs, Costs):
        raise UsageError(f"costs: pass a penstock.Costs; given: {type(costs).__name__}")
    if cluster is not None and not isinstance(cluster, Cluster):
        raise UsageError(f"cluster: pass a penstock.Cluster; given: {type(cluster).__name__}")
    if isinstance(schedule, Lowered) and (keep != "hold" or tuple(skips)):
        raise UsageError("a lowered schedule already has its keep policies and skips: leave keep= and skips= out")
    lowered = schedule if isinstance(schedule, Lowered) else lower(schedule, keep=keep, skips=skips)
    plan = lowered.schedule
    stage_costs = (costs or Costs()).for_stages(plan.num_stages)
    wiring = Wiring(lowered, stage_costs, cluster or Cluster())
    run = advance(wiring.queues())
    if not run.is_done:
        raise ScheduleError("the schedule deadlocks; verify() shows where")
    return wiring.timeline(run)


@dataclass(frozen=True)
class _Piece:
    """Rows for queues, sorted by queue: compute of lanes, sends on links, or copies on host links."""

    at: Positions  # rows
    queue: Positions  # the number of the queue of each row, from 0
    server: Positions  # the server of each queue
    duration: Floats
    lag: Floats


class Wiring:
    """Converts a lowered schedule to queues for `advance`, and the run back to a timeline.

    Positions number all work in the queues; `order` has the row of each position. Compute comes first.
    """

    def __init__(self, lowered: Lowered, costs: StageCosts, cluster: Cluster) -> None:
        self.lowered, self.costs, self.cluster = lowered, costs, cluster
        self.rows = lowered.rows
        self.where = np.array([list(Where).index(RULES[kind].where) for kind in KINDS], dtype=np.int8)[self.rows.kind]
        self.servers: dict[object, int] = {}
        self.pieces = [self._compute(), self._sends(), self._copies()]
        self.order = np.concatenate([piece.at for piece in self.pieces])

    def queues(self) -> Queues:
        """Return the queues, numbered lane after lane, then channel after channel."""
        first, last, server = [], [], []
        position = 0
        for piece in self.pieces:
            counts = np.bincount(piece.queue, minlength=len(piece.server))
            ends = position + np.cumsum(counts)
            first.append(ends - counts)
            last.append(ends)
            server.append(piece.server)
            position += len(piece.at)
        duration = np.concatenate([piece.duration for piece in self.pieces])
        lag = np.concatenate([piece.lag for piece in self.pieces])
        needs = self._overlap(self._needs(), duration, lag)
        return Queues(np.concatenate(first), np.concatenate(last), np.concatenate(server), needs, duration, lag)

    def pairs(self) -> tuple[Positions, Positions]:
        """Return the positions of the first and the second action of each overlapping pair."""
        place = np.empty(len(self.rows), dtype=np.int64)  # position of each compute row in the queues
        place[self.pieces[0].at] = np.arange(len(self.pieces[0].at))
        first, second = pair_rows(self.lowered.schedule, self.rows)
        return place[first], place[second]

    def timeline(self, run: Run) -> Timeline:
        """Return the spans of compute, sends and copies."""
        rows, order = self.rows, self.order
        lane_of_peer = self._peer_lane()
        return Timeline(
            name=self.lowered.schedule.name,
            num_lanes=self.lowered.schedule.num_lanes,
            kind=rows.kind[order],
            stage=rows.stage[order],
            mb=rows.mb[order],
            lane=rows.lane[order],
            to_lane=lane_of_peer[order],
            start=run.start,
            end=run.seen,
            place=order.astype(np.int32),
            saved_bytes=self.costs.saved_bytes,
            pending_bytes=self.costs.pending_bytes,
            input_bytes=self.costs.input_bytes,
        )

    def _pick(self, where: Where) -> Positions:
        return np.flatnonzero(self.where == list(Where).index(where))

    def _compute(self) -> _Piece:
        at, rows, costs = self._pick(Where.LANE), self.rows, self.costs
        on_lane = occupying(Where.LANE)
        table = np.stack([costs.seconds_of(kind) if kind in on_lane else 0 * costs.forward for kind in KINDS])
        speeds = self.cluster.speeds(self.lowered.schedule.num_lanes)
        duration = table[rows.kind[at], rows.stage[at]] / speeds[rows.lane[at]] + self.cluster.action_seconds
        servers = self._number([("lane", lane) for lane in range(len(speeds))])
        return _Piece(at, rows.lane[at].astype(np.int64), servers, duration, np.zeros(len(at)))

    def _sends(self) -> _Piece:
        """Return the sends, with one queue per pair of lanes; a send takes its bytes divided by the bandwidth."""
        at, rows, num_lanes = self._pick(Where.LINK), self.rows, self.lowered.schedule.num_lanes
        pair = rows.lane[at].astype(np.int64) * num_lanes + self._peer_lane()[at]
        order = np.argsort(pair, kind="stable")
        at, pair = at[order], pair[order]
        pairs, queue = np.unique(pair, return_inverse=True)
        links = [self.cluster.between(int(p) // num_lanes, int(p) % num_lanes) for p in pairs]
        # an activation crosses the cut after its stage, a gradient the cut before it
        is_forward = rows.kind[at] == KIND_INDEX[Kind.SEND_F]
        cut = np.where(is_forward, rows.stage[at], rows.peer[at])
        duration = self.costs.output_bytes[cut] / _column(links, "bytes_per_second")[queue]
        lag = self.costs.transfer[cut] + _column(links, "latency_seconds")[queue]
        servers = self._number([link.shared_as or ("pair", p) for p, link in zip(pairs.tolist(), links, strict=True)])
        return _Piece(at, queue.astype(np.int64), servers, duration, lag)

    def _copies(self) -> _Piece:
        at, rows, link = self._pick(Where.HOST_LINK), self.rows, self.cluster.host_link
        queue = 2 * rows.lane[at].astype(np.int64) + (rows.kind[at] == KIND_INDEX[Kind.FETCH])
        order = np.argsort(queue, kind="stable")
        at, queue = at[order], queue[order]
        num_queues = 2 * self.lowered.schedule.num_lanes if len(at) else 0
        servers = self._number([link.shared_as or ("host", number) for number in range(num_queues)])
        duration = self.costs.saved_bytes[rows.stage[at]] / link.bytes_per_second
        return _Piece(at, queue, servers, duration, np.full(len(at), link.latency_seconds))

    def _peer_lane(self) -> Ints:
        plan, rows = self.lowered.schedule, self.rows
        lane = np.full(len(rows), NONE, dtype=np.int32)
        sends = np.flatnonzero(rows.peer != NONE)
        lane[sends] = plan.home_table[rows.peer[sends], plan.way_table[rows.mb[sends]]]
        return lane

    def _needs(self) -> Ints:
        """Return the positions that the queued rows wait for; waiting for a receive means waiting for its send."""
        flow: Flow = self.lowered.flow
        rows = self.rows
        place = np.full(len(rows) + 1, NONE, dtype=np.int32)  # the last entry means "nothing to wait for"
        place[self.order] = np.arange(len(self.order), dtype=np.int32)
        receives = self._pick(Where.NOTHING)
        place[receives] = place[flow.needs[receives, 0]]
        columns = [place[flow.needs[self.order, k]] for k in range(flow.needs.shape[1])]
        issued = self._issued_after()[self.order]
        if not (place[issued] == columns[0])[issued >= 0].all():
            columns.append(place[issued])
        return np.stack(columns, axis=1)

    def _issued_after(self) -> Positions:
        """Return for each send and copy the compute row after which its lane issues it."""
        rows = self.rows
        is_lane = self.where == list(Where).index(Where.LANE)
        last = np.maximum.accumulate(np.where(is_lane, np.arange(len(rows)), -1))
        before = np.where(last >= rows.starts[rows.lane], last, NONE)
        return np.where(is_lane, NONE, before)

    def _overlap(self, needs: Ints, duration: Floats, lag: Floats) -> Ints:
        """Let overlapping neighbours wait for each other's needs, start together, and take the time of the pair."""
        plan = self.lowered.schedule
        if not plan.overlaps:
            return needs
        first, second = self.pairs()
        at = self.pieces[0].at
        stages = self.rows.stage[at]
        given = np.maximum(self.costs.overlapped[stages[first]], self.costs.overlapped[stages[second]])
        speed = self.cluster.speeds(plan.num_lanes)[self.rows.lane[at][first]]
        both = duration[first] + duration[second]
        together = np.where(np.isnan(given), both, given / speed + 2 * self.cluster.action_seconds)
        duration[first], lag[first], duration[second] = 0.0, together, together
        return wait_together(needs, first, second)

    def _number(self, names: list[object]) -> Positions:
        """Number servers by name, across all pieces; equal names are one server."""
        return np.array([self.servers.setdefault(name, len(self.servers)) for name in names], dtype=np.int64)


def _column(links: list[Link], name: str) -> Floats:
    return np.array([getattr(link, name) for link in links], dtype=np.float64)
