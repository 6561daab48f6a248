"""Graphs and profiles for the tests of partitioning, and a second opinion: every cut there is, priced by hand."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import strategies as st

from penstock.model.graph import Graph, Node, Parameter, Size, Value
from penstock.model.profile import Profile
from penstock.planning.cluster import Cluster, Link

SAME = 1e-9


def value(name, producer, elements, *, has_grad=True):
    return Value(name, producer, (Size(0, elements),), "uint8", 1, has_grad=has_grad)


def chain_graph(widths, *, parameters=(), **given):
    """Nodes one after the other; node i makes a value of widths[i] bytes a sample and uses parameter i, if any."""
    values = [value("in", -1, 1, has_grad=False)]
    values += [value(f"v{i}", i, width) for i, width in enumerate(widths)]
    sizes = dict(enumerate(parameters))
    nodes = [
        Node(f"n{i}", "op", f"block.{i // 2}", (i,), (i + 1,), (f"p{i}",) if i in sizes else ())
        for i in range(len(widths))
    ]
    made = {f"p{i}": Parameter(f"p{i}", size) for i, size in sizes.items()}
    return Graph(tuple(nodes), tuple(values), (0,), (len(widths),), made, **given)


def profile_of(graph, seconds, *, saved=0.0, pending=0.0, **given):
    """A profile whose node i takes seconds[i] in all, a third each for forward and both gradients."""
    third = np.array(seconds, dtype=float) / 3
    full = np.ones(len(graph.nodes))
    return Profile(
        **{"graph": graph, "batch_size": 1, "forward": third, "input_grad": third, "weight_grad": third}
        | {"saved_bytes": saved * full, "pending_bytes": pending * full}
        | given
    )


@st.composite
def profiles(draw, most=7):
    """Random models: skips, branches, tied and frozen parameters, free nodes, places that may not be cut."""
    small = st.integers(0, 9)
    n = draw(st.integers(2, most))
    pool = {
        f"p{i}": Parameter(f"p{i}", draw(small), is_trainable=draw(st.booleans()))
        for i in range(draw(st.integers(0, 4)))
    }
    values, nodes = [value("in", -1, 3, has_grad=False)], []
    for i in range(n):
        used = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        can_be_free = all(values[v].producer < 0 or nodes[values[v].producer].is_free for v in used)
        is_free = can_be_free and draw(st.integers(0, 3)) == 0
        makes = range(len(values), len(values) + draw(st.integers(1, 2)))
        values += [value(f"v{v}", i, draw(small), has_grad=draw(st.booleans())) for v in makes]
        names = draw(st.lists(st.sampled_from(sorted(pool)), max_size=2, unique=True)) if pool else []
        nodes.append(Node(f"n{i}", "op", "", tuple(used), tuple(makes), tuple(names), is_free=is_free))
    no_cut = draw(st.sets(st.integers(1, n - 1), max_size=2))
    graph = Graph(tuple(nodes), tuple(values), (0,), (len(values) - 1,), pool, uncuttable=frozenset(no_cut))
    columns = {
        name: draw(st.lists(small, min_size=n, max_size=n))
        for name in ("forward", "input_grad", "weight_grad", "saved_bytes", "pending_bytes")
    }
    return Profile(graph=graph, batch_size=2, optimizer_bytes=draw(st.sampled_from([0.0, 2.0])), **columns)


@st.composite
def clusters(draw, lanes):
    link = st.builds(
        Link,
        latency_seconds=st.integers(0, 3),
        bytes_per_second=st.sampled_from([0.5, 2.0, float("inf")]),
        shared_as=st.sampled_from([None, None, "bus"]),
    )
    pairs = [(a, b) for a in range(lanes) for b in range(lanes) if a != b]
    links = {pair: draw(link) for pair in pairs if draw(st.integers(0, 2)) == 0}
    speed = draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=lanes, max_size=lanes))
    return Cluster(speed=speed, link=draw(link), links=links)


class Oracle:
    """Prices cuts straight from the definitions in docs/design/partition.md, one by one."""

    def __init__(self, profile, schedule, cluster, *, keep="hold", waits=False):
        self.profile, self.graph, self.schedule, self.cluster = profile, profile.graph, schedule, cluster
        self.keep, self.waits = keep, waits
        self.speeds = cluster.speeds(schedule.num_lanes)

    def all_cuts(self, forced=(), apart=()):
        """Every way to cut; `apart` holds positions that may not be cut."""
        n = len(self.graph.nodes)
        may = [c for c in range(1, n) if c not in self.graph.uncuttable and c not in apart]
        return [c for c in combinations(may, self.schedule.num_stages - 1) if set(forced) <= set(c)]

    def width(self, cut, *, grads=False):
        crossing = self.graph.crossing(cut)
        return sum(
            self.graph.values[v].bytes_at(self.profile.batch_size)
            for v in crossing
            if not grads or self.graph.values[v].has_grad
        )

    def period(self, cuts):
        plan, p = self.schedule, self.profile
        bounds = [0, *cuts, len(self.graph.nodes)]
        work = [
            sum(p.forward[i] * (2 if self.keep == "recompute" else 1) + p.input_grad[i] + p.weight_grad[i] for i in r)
            for r in (range(a, b) for a, b in pairwise(bounds))
        ]
        lanes, wires, trips = [0.0] * plan.num_lanes, {}, []
        is_chain = len(plan.ways) == 1 and len(set(plan.lane_of)) == plan.num_stages
        shares = [sum(way == w for way in plan.way_of) / plan.num_mbs for w in range(len(plan.ways))]
        for way, share in zip(plan.ways, shares, strict=True):
            for stage, lane in enumerate(way):
                lanes[lane] += share * work[stage] / self.speeds[lane]
            for s, cut in enumerate(cuts):
                a, b = way[s], way[s + 1]
                there, back = self.cluster.between(a, b), self.cluster.between(b, a)
                ahead, returned = (
                    self.width(cut) / there.bytes_per_second,
                    self.width(cut, grads=True) / back.bytes_per_second,
                )
                trips.append(0.0 if a == b else ahead + returned + there.latency_seconds + back.latency_seconds)
                if a == b:
                    continue
                mine = s if is_chain and self.waits else None  # then each cut has its wires for itself
                for link, ends, taken in ((there, (a, b), ahead), (back, (b, a), returned)):
                    name = (link.shared_as or ends, mine)
                    wires[name] = wires.get(name, 0.0) + share * taken
                if self.waits and not is_chain:
                    lanes[a] += share * trips[-1] / 2
                    lanes[b] += share * trips[-1] / 2
        longest = max([*lanes, *wires.values()])
        if self.waits and is_chain:
            order = [lanes[lane] for lane in plan.lane_of]
            for i in range(len(order)):
                for j in range(i, len(order)):
                    longest = max(longest, (sum(order[i : j + 1]) + sum(trips[i:j])) / (j - i + 1))
        return longest

    def lane_bytes(self, cuts):
        bounds = [0, *cuts, len(self.graph.nodes)]
        stages = [range(a, b) for a, b in pairwise(bounds)]
        return [self._lane(lane, stages, bounds) for lane in range(self.schedule.num_lanes)]

    def _lane(self, lane, stages, bounds):
        p = self.profile
        used = {
            name for s in self.schedule.stages_of(lane) for i in stages[s] for name in self.graph.nodes[i].parameters
        }
        total = 0.0
        for name in used:
            parameter = self.graph.parameters[name]
            total += parameter.num_bytes * (1 + (1 + p.optimizer_bytes) * parameter.is_trainable)
        held = peak = 0.0
        for action in self.schedule.lanes[lane]:
            nodes = stages[action.stage]
            saved, pending = (sum(column[i] for i in nodes) for column in (p.saved_bytes, p.pending_bytes))
            kept = self.width(bounds[action.stage]) if action.stage else 0.0
            again = self.keep == "recompute"
            kind = str(action.kind.value)
            if kind == "F":
                held += kept if again else saved
            if kind in "BI":
                held += saved if again else 0.0
            peak = max(peak, held)
            if kind in "BI":
                held -= saved + (kept if again else 0.0)
            held += pending * ((kind == "I") - (kind == "W"))
        return total + peak

    def best(self, limits, **asked):
        """The best cuts, as the tie rule has it: each in turn the narrowest, then the earliest."""
        fitting = [
            cuts
            for cuts in self.all_cuts(**asked)
            if all(used <= limit * (1 + SAME) for used, limit in zip(self.lane_bytes(cuts), limits, strict=True))
        ]
        if not fitting:
            return None
        least = min(map(self.period, fitting))
        equal = [cuts for cuts in fitting if self.period(cuts) <= least * (1 + SAME)]
        return min(equal, key=lambda cuts: [(self.width(c), c) for c in cuts]), least
