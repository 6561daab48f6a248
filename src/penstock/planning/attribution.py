"""Attribution: split the bubble of a timeline into causes.

The order of the step is simulated several times. Each run adds one more real effect:

    run     actions take              transfers take      the bubble that the run adds
    even    the mean of their kind    no time             warm-up and cool-down, caused by the order
    uneven  their own time            no time             imbalance
    sent    their own time            their own time      transfers
    as was  the timeline itself                           runtime overhead: the rest

All runs keep the order of each lane and wait for the same values. In each run, the bubble of a lane is the makespan
minus the compute time of the lane. No run waits for more than the step did, so makespans grow from `uneven` on. If
clocks disagree, a value can seem to be used before it was made; then the makespan of the earlier run is limited to
that of the later. A lane whose actions take longer than the mean can idle less in `uneven` than in `even`. It then has
no imbalance, and its idle time counts as warm-up.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.errors import ScheduleError, UsageError
from penstock.model.costs import Costs
from penstock.planning.cluster import Cluster
from penstock.planning.simulate import Wiring
from penstock.report.bubble_causes import Causes
from penstock.report.timeline import Timeline
from penstock.schedule.actions import KINDS, Floats, Ints, Positions
from penstock.schedule.advance_lanes import advance
from penstock.schedule.flow import NONE
from penstock.schedule.lower import Lowered
from penstock.schedule.rules import RULES, Where

_NOISE = 1e-6  # of the step: smaller differences come from clocks and rounding


def find_causes(timeline: Timeline, lowered: Lowered) -> Causes:
    """Return the causes of the bubble of a timeline; a simulated timeline has no runtime overhead.

    Args:
        timeline: a step with a span for each compute action and a `place` for each span. A send without a known end
            counts as arrived when its receiver stopped waiting. Actions without a span take no time.
        lowered: the schedule that the step ran.

    Raises:
        UsageError: if the timeline belongs to another schedule.

    >>> from penstock.planning.simulate import simulate
    >>> from penstock.schedule.lower import lower
    >>> from penstock.schedule.builders.one_f_one_b import build_1f1b
    >>> lowered = lower(build_1f1b(lanes=2, micro_batches=4))
    >>> causes = find_causes(simulate(lowered, Costs(forward=[1.0, 3.0], transfer=0.5)), lowered)
    >>> round(causes.warm_up, 3), round(causes.imbalance, 3), round(causes.transfers, 3), causes.overhead
    (0.113, 0.263, 0.025, 0.0)
    """
    step = timeline.step_seconds if len(timeline) else 0.0
    work = _Work(timeline, lowered)
    noise = _NOISE * step
    sent = _at_most(step, work.makespan(work.duration, work.lag), noise)
    uneven = _at_most(sent, work.makespan(work.duration, work.compute_lag), noise)
    even = work.makespan(work.even_duration, work.even_lag)
    still = np.maximum(0.0, uneven - np.array(timeline.busy_seconds))
    warm_up = _at_most(still, np.maximum(0.0, even - work.lane_sums(work.even_duration)), noise)
    waited, ready = work.waits()
    share = 1 / step if step else 0.0
    lanes = [
        Causes(
            step,
            warm_up=float(warm_up[lane] * share),
            imbalance=float((still[lane] - warm_up[lane]) * share),
            transfers=float((sent - uneven) * share),
            overhead=float((step - sent) * share),
            waited_for_transfers=float(waited[lane] * share),
            stood_ready=float(ready[lane] * share),
        )
        for lane in range(timeline.num_lanes)
    ]
    return Causes.of_lanes(step, lanes)


class _Work:
    """The spans of a timeline as work in queues, with the duration of each and the time its value was in transit.

    Positions are those of `Wiring.queues`: compute, lane after lane, then sends and copies.
    """

    def __init__(self, timeline: Timeline, lowered: Lowered) -> None:
        self.timeline, self.lowered = timeline, lowered
        self.wiring = Wiring(lowered, Costs().for_stages(lowered.schedule.num_stages), Cluster())
        self.queues = self.wiring.queues()
        self.num_compute = len(self.wiring.pieces[0].at)
        span_of = self._span_of_row()
        self.span = span_of[self.wiring.order]
        self._check_all_there()
        self._read_compute()
        self._read_transfers(span_of)

    def makespan(self, duration: Floats, lag: Floats) -> float:
        """Return the makespan of a run with the given times."""
        run = advance(replace(self.queues, duration=duration, lag=lag))
        if not run.is_done:
            raise ScheduleError("the schedule deadlocks; verify() shows where")
        return float(run.seen.max(initial=0.0))

    def lane_sums(self, seconds: Floats) -> Floats:
        """Return the compute time of each lane."""
        lane = self.wiring.pieces[0].queue
        sums = np.zeros(self.timeline.num_lanes)
        np.add.at(sums, lane, seconds[: self.num_compute])
        return sums

    def waits(self) -> tuple[Floats, Floats]:
        """Return for each lane the seconds spent waiting for values in transit, and idling with all values there."""
        needs = np.where(self.queues.needs < 0, len(self.seen), self.queues.needs)
        seen, lag = np.append(self.seen, -np.inf), np.append(self.lag, 0.0)
        lag[: self.num_compute] = 0.0
        waited, ready = np.zeros(self.timeline.num_lanes), np.zeros(self.timeline.num_lanes)
        position = np.empty(len(self.timeline), dtype=np.int64)
        position[self.span[: self.num_compute]] = np.arange(self.num_compute)
        for lane, own in enumerate(self.timeline.compute):
            if not len(own.at):
                continue
            free = np.concatenate([[self.timeline.start.min()], own.end[:-1]])
            wanted = needs[position[own.at]]
            there = np.maximum(seen[wanted].max(axis=1), free)
            ready[lane] = np.maximum(0.0, own.start - there).sum()
            since = np.maximum(seen[wanted] - lag[wanted], free[:, None])
            on_way = np.minimum(seen[wanted], own.start[:, None]) - since
            waited[lane] = np.maximum(0.0, on_way).max(axis=1).sum()
        return waited, ready

    def _span_of_row(self) -> Ints:
        """Return the span of each row, or -1."""
        timeline, rows = self.timeline, self.lowered.rows
        place = timeline.place
        if len(place) != len(timeline):
            raise UsageError("the timeline needs `place`: the position of each span in the lowered lanes")
        if len(place) and not 0 <= place.min() <= place.max() < len(rows):
            raise UsageError(f"the timeline has places outside the schedule; actions: {len(rows)}")
        for name in ("kind", "stage", "mb", "lane"):
            other = np.flatnonzero(getattr(rows, name)[place] != getattr(timeline, name))
            if other.size:
                at = int(other[0])
                raise UsageError(
                    f"the timeline belongs to another schedule: span {at} has the place of "
                    f"{rows.action(int(place[at]))} on lane {rows.lane[place[at]]}, but another {name}"
                )
        if timeline.num_lanes != self.lowered.schedule.num_lanes or len(np.unique(place)) < len(place):
            raise UsageError("the timeline belongs to another schedule or has several steps: each action may run once")
        span_of = np.full(len(rows), NONE, dtype=np.int32)
        span_of[place] = np.arange(len(place), dtype=np.int32)
        return span_of

    def _check_all_there(self) -> None:
        rows = self.wiring.order[: self.num_compute][self.span[: self.num_compute] == NONE]
        if rows.size:
            names = ", ".join(str(self.lowered.rows.action(int(row))) for row in rows[:5])
            raise UsageError(f"the timeline lacks spans of compute actions; missing: {len(rows)}, such as {names}")

    def _read_compute(self) -> None:
        """Read the durations of actions; an overlapping pair is one piece of work whose halves have their own ends."""
        timeline, count, size = self.timeline, self.num_compute, len(self.span)
        span = self.span[:count]
        start, seconds = timeline.start.copy(), np.zeros(len(timeline))
        for own in timeline.compute:
            start[own.at], seconds[own.at] = own.start, own.end - own.start
        self.start, ends = start[span], timeline.known_end[span]
        self.duration, self.compute_lag = np.zeros(size), np.zeros(size)
        self.duration[:count] = seconds[span]
        group = timeline.kind[span].astype(np.int64)
        first, second = self.wiring.pairs()
        together = self.duration[first] + self.duration[second]
        begin = np.minimum(timeline.start[span[first]], timeline.start[span[second]])
        self.duration[first], self.duration[second] = 0.0, together
        self.compute_lag[first] = np.minimum(together, ends[first] - begin)
        self.compute_lag[second] = np.minimum(together, ends[second] - begin) - together
        group[first] += len(KINDS)
        group[second] += 2 * len(KINDS)
        self.even_duration, self.even_lag = (_means(group, x, count) for x in (self.duration, self.compute_lag))
        self.seen = np.full(size, -np.inf)
        self.seen[:count] = ends

    def _read_transfers(self, span_of: Ints) -> None:
        """Read how long values were in transit: from when they were ready and sent until they arrived."""
        timeline, count = self.timeline, self.num_compute
        span = self.span[count:]
        issued = np.where(span != NONE, timeline.start[span], -np.inf)
        arrived = np.where(span != NONE, timeline.end[span], np.nan)
        arrived = np.where(np.isnan(arrived), self._end_of_wait(span_of)[self.wiring.order[count:]], arrived)
        arrived = np.where(np.isnan(arrived), issued, np.maximum(arrived, issued))
        self.seen[count:] = np.minimum(arrived, self._first_use())
        needs = np.where(self.queues.needs < 0, len(self.seen), self.queues.needs)[count:]
        made = np.append(self.seen, -np.inf)[needs].max(axis=1)
        left = self._left(issued, made) if timeline.is_measured else made  # a simulation issues at once
        self.lag = self.compute_lag.copy()
        on_way = self.seen[count:] - np.maximum(left, made)
        self.lag[count:] = np.where(np.isfinite(on_way), np.maximum(0.0, on_way), 0.0)

    def _left(self, issued: Floats, made: Floats) -> Floats:
        """Return when values left: when they were issued, or when they began to queue in their channel."""
        left = issued.copy()
        for first, last in zip(self.queues.first.tolist(), self.queues.last.tolist(), strict=True):
            if first >= self.num_compute and last > first:
                own = slice(first - self.num_compute, last - self.num_compute)
                taken_until = np.concatenate([[-np.inf], np.maximum.accumulate(self.seen[first : last - 1])])
                queued = np.minimum(issued[own], taken_until) - made[own]
                left[own] -= np.where(np.isfinite(queued), np.maximum(0.0, queued), 0.0)
        return left

    def _end_of_wait(self, span_of: Ints) -> Floats:
        """Return for the row of each send when its receiver stopped waiting for it; NaN if it did not wait."""
        rows, timeline = self.lowered.rows, self.timeline
        ends = np.full(len(rows), np.nan)
        where = np.array([RULES[kind].where is Where.NOTHING for kind in KINDS])[rows.kind]
        receives = np.flatnonzero(where & (span_of != NONE))
        span = span_of[receives]
        waited = timeline.known_end[span] > timeline.start[span]
        ends[self.lowered.flow.needs[receives[waited], 0]] = timeline.known_end[span[waited]]
        return ends

    def _first_use(self) -> Floats:
        """Return when each sent or copied value was first used; it had arrived by then."""
        first = np.full(len(self.seen) + 1, np.inf)
        for column in self.queues.needs[: self.num_compute].T:
            np.minimum.at(first, np.where(column < 0, len(self.seen), column), self.start)
        return first[self.num_compute : -1]


def _at_most(limit: float | Floats, seconds: float | Floats, noise: float) -> Floats:
    """Limit seconds, and round them to the limit if they are closer to it than the noise."""
    return np.where(seconds > np.subtract(limit, noise), limit, seconds)


def _means(group: Positions, seconds: Floats, count: int) -> Floats:
    """Replace the first `count` seconds by the mean of their group, and the others by zero."""
    total = np.bincount(group, weights=seconds[:count])
    number = np.bincount(group)
    even = np.zeros_like(seconds)
    even[:count] = (total / np.maximum(1, number))[group]
    return even
