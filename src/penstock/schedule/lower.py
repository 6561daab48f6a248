"""Lowering: add transfers, recompute, offload, fetch and slots to a schedule, so that a runtime can run it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ScheduleError, UsageError, nearest
from penstock.schedule.actions import KIND_INDEX, KINDS, Ints, Kind, Positions
from penstock.schedule.flow import NONE, Flow, Rows, check_skips, pair_rows, trace_flow
from penstock.schedule.keep_policies import POLICIES, Keep, check_keep
from penstock.schedule.peak_memory import HELD
from penstock.schedule.rules import RULES, At, Rule, Value
from penstock.schedule.schedule import Schedule
from penstock.schedule.violations import find_incomplete, find_unknown

# tagged: a receive names its message. ordered: one queue for each pair of lanes; sends do not block.
# blocking: like ordered, but a send waits until its receive is reached.
Channels = Literal["tagged", "ordered", "blocking"]


# The order of the actions that lowering places around one action.
_FETCH, _RECOMPUTE, _RECV, _SELF, _SEND, _OFFLOAD = range(6)
_SLOTS_PER_ACTION = 8


@dataclass(frozen=True)
class Lowered:
    """A schedule with all actions of a runtime, still as readable lanes."""

    schedule: Schedule
    rows: Rows
    keep: tuple[Keep, ...]
    skips: tuple[tuple[int, int], ...] = ()
    channels: Channels = "tagged"

    @cached_property
    def flow(self) -> Flow:
        """The actions that each action waits for."""
        return trace_flow(self.schedule, self.rows, skips=self.skips)

    @cached_property
    def slots(self) -> Slots:
        """The buffer of each value; a buffer is reused after the action that frees its value."""
        return assign_slots(self.rows)

    def lane_texts(self, *, slots: bool = False) -> Iterator[list[str]]:
        """Yield the actions of each lane as texts; a transfer beyond the next stage names the stage: `0SEND_F1>3`.

        Args:
            slots: also show the slot of the value that an action makes: `1RECV_F0#2`.
        """
        for lane in range(self.schedule.num_lanes):
            yield [self._text(at, slots=slots) for at in range(*self.rows.starts[lane : lane + 2].tolist())]

    def _text(self, at: int, *, slots: bool) -> str:
        action, peer = self.rows.action(at), int(self.rows.peer[at])
        text = str(action)
        if peer != NONE and abs(peer - action.stage) > 1:
            text += f">{peer}"
        if slots and (slot := int(self.slots.of[at])) >= 0:
            text += f"#{slot}"
        return text

    def __str__(self) -> str:
        return "\n".join(" ".join(lane) for lane in self.lane_texts())


def lower(
    schedule: Schedule,
    *,
    keep: Keep | Sequence[Keep] = "hold",
    skips: Iterable[Sequence[int]] = (),
    channels: Channels = "tagged",
) -> Lowered:
    """Add transfers, and the actions that the keep policies require.

    Args:
        schedule: a schedule that verifies.
        keep: what stages do with saved values: one policy, or one per stage.
        skips: (from stage, to stage) for values that skip stages; they go directly from lane to lane.
        channels: how the transport matches receives to sends. If it matches by order, receives are posted in
            the order of the sends.

    >>> from penstock.schedule.builders.one_f_one_b import build_1f1b
    >>> print(lower(build_1f1b(lanes=2, micro_batches=1)))
    0F0 0SEND_F0 0RECV_B0 0B0
    1RECV_F0 1F0 1B0 1SEND_B0
    """
    if not isinstance(schedule, Schedule):
        raise UsageError(f"only a schedule can be lowered; given: {type(schedule).__name__}")
    policies = check_keep(keep, schedule.num_stages)
    check_channels(channels)
    pairs = check_skips(skips)
    flow = _checked_flow(schedule, pairs)
    front, back = _pair_ends(schedule, flow.rows)
    rows = flow.rows
    parts = [_Part(rows.kind, rows.stage, rows.mb, rows.peer, _key(np.arange(len(rows)), _SELF))]
    parts += _transfers(schedule, flow, channels, front, back)
    parts += _keep_actions(flow, policies, front, back)
    return Lowered(schedule, _merge(parts, rows), policies, pairs, channels)


def _checked_flow(schedule: Schedule, skips: tuple[tuple[int, int], ...]) -> Flow:
    """Return the flow of a schedule; refuse a schedule that is incomplete."""
    rows = Rows.of(schedule)
    faults = list(find_unknown(schedule, rows, is_lowered=False))
    if not faults:
        flow = trace_flow(schedule, rows, skips=skips)
        faults = find_incomplete(schedule, flow)
    if faults:
        raise ScheduleError(f"{schedule.name} cannot run; faults: {len(faults)}, verify() lists all; {faults[0]}")
    return flow


def check_channels(channels: str) -> Channels:
    """Return `channels` if it is a known value."""
    if channels not in get_args(Channels):
        hint = nearest(str(channels), get_args(Channels))
        raise ScheduleError(f"channels: {channels!r} is not one of {', '.join(get_args(Channels))}.{hint}")
    return channels  # type: ignore[return-value]  # it is one of them


@dataclass(frozen=True)
class _Part:
    """Actions and their sort keys: the position of the action they belong to, then their order around it."""

    kind: NDArray[np.int8]
    stage: Ints
    mb: Ints
    peer: Ints
    key: Positions


def _key(anchor: Positions, turn: int) -> Positions:
    return anchor.astype(np.int64) * _SLOTS_PER_ACTION + turn


def _pair_ends(schedule: Schedule, rows: Rows) -> tuple[Positions, Positions]:
    """Return the first and the last action of each action's overlapping pair; without a pair, the action itself."""
    front, back = np.arange(len(rows)), np.arange(len(rows))
    first, second = pair_rows(schedule, rows)
    front[second], back[first] = first, second
    return front, back


def _transfers(schedule: Schedule, flow: Flow, channels: Channels, front: Positions, back: Positions) -> list[_Part]:
    """Return the sends and receives of all values whose maker and user are on different lanes."""
    edges = np.array(flow.edges, dtype=np.int32).reshape(-1, 2)
    if not len(edges):
        return []
    grid = np.broadcast_to(np.arange(schedule.num_mbs, dtype=np.int32), (len(edges), schedule.num_mbs))
    source, target = (np.broadcast_to(edges[:, end : end + 1], grid.shape) for end in (0, 1))
    home = schedule.home_table[:, schedule.way_table]
    crosses = home[source[:, 0]] != home[target[:, 0]]
    activations = _Transfers.of(flow, Value.ACTIVATION, source[crosses], target[crosses], grid[crosses])
    gradients = _Transfers.of(flow, Value.GRADIENT, target[crosses], source[crosses], grid[crosses])
    together = _Transfers.in_order_of_sending(activations, gradients)
    receive_at = front[together.user]
    if channels != "tagged":
        receive_at = _post_in_order(together.maker, receive_at, flow.rows, schedule.num_lanes)
    send, recv = (np.where(together.is_gradient, KIND_INDEX[b], KIND_INDEX[f]).astype(np.int8) for f, b in _KIND_PAIRS)
    return [
        _Part(send, together.from_stage, together.mb, together.to_stage, _key(back[together.maker], _SEND)),
        _Part(recv, together.to_stage, together.mb, together.from_stage, _key(receive_at, _RECV)),
    ]


_KIND_PAIRS = ((Kind.SEND_F, Kind.SEND_B), (Kind.RECV_F, Kind.RECV_B))


@dataclass(frozen=True)
class _Transfers:
    """Values in transit: source and target stage, the action that makes each value, and the action that uses it."""

    is_gradient: NDArray[np.bool_]
    from_stage: Ints
    to_stage: Ints
    mb: Ints
    maker: Positions
    user: Positions

    @classmethod
    def of(cls, flow: Flow, value: Value, from_stage: Ints, to_stage: Ints, mb: Ints) -> _Transfers:
        # the action that makes this value on the source stage has a counterpart on the target stage, which uses it
        maker, user = (flow.made[value][stage, mb].astype(np.int64) for stage in (from_stage, to_stage))
        return cls(np.full(len(mb), value is Value.GRADIENT), from_stage, to_stage, mb, maker, user)

    @classmethod
    def in_order_of_sending(cls, *groups: _Transfers) -> _Transfers:
        """Join groups in the order of the sending actions; values of one action keep their order."""
        maker = np.concatenate([group.maker for group in groups])
        order = np.argsort(maker, kind="stable")
        return cls(*(np.concatenate([getattr(g, f.name) for g in groups])[order] for f in fields(cls)))


def _post_in_order(maker: Positions, receive_at: Positions, rows: Rows, num_lanes: int) -> Positions:
    """Move receives forward so that each channel receives in the order of its sends.

    Go through the transfers of a channel from the last send to the first: each receive must be no later than the
    one after it.
    """
    channel = rows.lane[maker].astype(np.int64) * num_lanes + rows.lane[receive_at]
    order = np.argsort(channel, kind="stable")
    bounds = np.flatnonzero(np.diff(channel[order], prepend=-1, append=-1))
    moved = receive_at[order]
    for begin, end in pairwise(bounds):
        moved[begin:end] = np.minimum.accumulate(moved[begin:end][::-1])[::-1]
    posted = np.empty_like(receive_at)
    posted[order] = moved
    return posted


def _keep_actions(flow: Flow, keep: tuple[Keep, ...], front: Positions, back: Positions) -> list[_Part]:
    """Return the recompute, offload and fetch actions that the policies require."""
    parts: list[_Part] = []

    def add(kind: Kind, stages: Ints, num_mbs: int, key: Positions) -> None:
        stage, mb = np.repeat(stages, num_mbs), np.tile(np.arange(num_mbs, dtype=np.int32), len(stages))
        parts.append(_Part(np.full(len(mb), KIND_INDEX[kind], np.int8), stage, mb, np.full_like(mb, NONE), key))

    for name, policy in POLICIES.items():
        stages = np.array([s for s, chosen in enumerate(keep) if chosen == name], dtype=np.int32)
        if not stages.size or not (policy.recomputes or policy.offloads):
            continue
        num_mbs = flow.made[Value.SAVED].shape[1] - policy.spares_last
        forward = flow.made[Value.SAVED][stages, :num_mbs].astype(np.int64).ravel()
        backward = flow.made[Value.GRADIENT][stages, :num_mbs].astype(np.int64).ravel()
        if policy.recomputes:
            # before the receive: recomputing needs no gradient, so it overlaps the transfer
            add(Kind.RECOMPUTE, stages, num_mbs, _key(front[backward], _RECOMPUTE))
        else:
            # one action early, so that the fetch overlaps compute, but not before the offload
            early = np.minimum(np.maximum(front[backward] - 1, back[forward] + 1), front[backward])
            add(Kind.OFFLOAD, stages, num_mbs, _key(back[forward], _OFFLOAD))
            add(Kind.FETCH, stages, num_mbs, _key(front[early], _FETCH))
    return parts


def _merge(parts: list[_Part], base: Rows) -> Rows:
    key = np.concatenate([part.key for part in parts])
    order = np.argsort(key, kind="stable")
    columns = ([getattr(part, name) for part in parts] for name in ("kind", "stage", "mb", "peer"))
    kind, stage, mb, peer = (np.concatenate(column)[order] for column in columns)
    lane = base.lane[key[order] // _SLOTS_PER_ACTION]
    starts = np.searchsorted(lane, np.arange(len(base.starts)), side="left").astype(np.int64)
    return Rows(kind, stage, mb, lane, peer, starts)


# ---- slots: buffers that a runtime can allocate once and reuse


Pool = tuple[int, int, Value, int]  # lane, stage, value, and for a received value its source stage (else -1)

_HELD = HELD - {Value.INPUT}  # an input stays in the slot that received it


@dataclass(frozen=True)
class Slots:
    """The slot of the value that each action leaves in a buffer (-1: none), and the number of slots per pool."""

    of: Ints
    counts: dict[Pool, int]


def assign_slots(rows: Rows) -> Slots:
    """Give each value the lowest free slot of its pool; rows must come from `lower`."""
    of = np.full(len(rows), NONE, dtype=np.int32)
    counts: dict[Pool, int] = defaultdict(int)
    free: dict[Pool, list[int]] = defaultdict(list)
    held: dict[tuple[int, int, Value, int], list[tuple[Pool, int]]] = defaultdict(list)  # by lane, stage, value, mb
    again = rows.where(Kind.RECOMPUTE)
    recomputed = set(zip(rows.stage[again].tolist(), rows.mb[again].tolist(), strict=True))
    columns = (column.tolist() for column in (rows.kind, rows.stage, rows.mb, rows.lane, rows.peer))
    for at, (kind, stage, mb, lane, peer) in enumerate(zip(*columns, strict=True)):
        rule = RULES[KINDS[kind]]
        for value in (*(v for v in rule.makes if v in _HELD), *rule.remakes):
            if value is Value.SAVED and value in rule.makes and (stage, mb) in recomputed:
                continue  # dropped at once: the recompute makes it again
            pool = (lane, stage, value, peer)
            slot = heapq.heappop(free[pool]) if free[pool] else counts[pool]
            counts[pool] = max(counts[pool], slot + 1)
            held[lane, stage, value, mb].append((pool, slot))
            of[at] = slot
        for value in _released(rule, recomputes=(stage, mb) in recomputed):
            for pool, slot in held.pop((lane, stage, value, mb), ()):
                heapq.heappush(free[pool], slot)
    return Slots(of, dict(counts))


def _released(rule: Rule, *, recomputes: bool) -> tuple[Value, ...]:
    """Return the values whose slots an action releases.

    The action that uses a received value releases it. A stage that recomputes keeps its input longer.
    """
    used_up = tuple(need.value for need in rule.needs if need.at in (At.BEFORE, At.AFTER))
    if recomputes:
        kept = (Value.ACTIVATION,) if Value.INPUT in rule.frees else ()
        used_up = tuple(value for value in used_up if value is not Value.ACTIVATION) + kept
    return used_up + tuple(v for v in rule.frees if v in _HELD)
