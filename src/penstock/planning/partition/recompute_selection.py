"""Recompute selection: choose nodes to recompute so that lanes fit in memory with little extra time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import PartitionError
from penstock.model.graph import Graph
from penstock.model.profile import Profile
from penstock.planning.memory_limits import Limit, limit_per_lane
from penstock.planning.partition.partition_memory import holdings_of
from penstock.report.units import show_bytes
from penstock.schedule.actions import Floats
from penstock.schedule.schedule import Schedule


def select_recomputed(
    profile: Profile, cuts: Sequence[int], schedule: Schedule, memory_limit: Limit
) -> tuple[tuple[range, ...], ...]:
    """Return for each stage the runs of nodes to recompute in its backward.

    Nodes with the most saved bytes per second are chosen first, until the lane fits. A run of neighbours keeps only its
    inputs. Nodes that use buffers are left out, since running them twice could change the buffers twice.

    Raises:
        PartitionError: if a lane does not fit even if all these nodes are recomputed.
    """
    limits = limit_per_lane(memory_limit, schedule.num_lanes)
    ranges = profile.graph.stages(cuts)
    chosen: list[set[int]] = [set() for _ in ranges]
    for lane, holding in enumerate(holdings_of(schedule, "hold")):
        nodes = [node for stage in holding.stages for node in ranges[stage]]
        room = float(limits[lane]) - profile.state_bytes(nodes)
        order = _candidates(profile, nodes)
        stage_of = {node: stage for stage in holding.stages for node in ranges[stage]}
        taken = 0
        while (held := _held(profile, holding.stages, holding.counts, ranges, chosen)) > room:
            if taken == len(order):
                raise PartitionError(
                    f"lane {lane} needs {show_bytes(held - room)} more than its memory limit of "
                    f"{show_bytes(limits[lane])}, even if everything possible is recomputed; use more stages, smaller "
                    'micro-batches, or keep="recompute"'
                )
            count = max(1, len(order) // 64)  # in steps: faster, and the choice is only slightly too large
            for node in order[taken : taken + count]:
                chosen[stage_of[node]].add(node)
            taken = min(len(order), taken + count)
    return tuple(_runs({node for run in _runs(nodes) for node in _cuttable(run, profile.graph)}) for nodes in chosen)


def _cuttable(run: range, graph: Graph) -> range:
    """Extend a run until cuts may lie at both of its ends."""
    start, stop = run.start, run.stop
    while start in graph.uncuttable:
        start -= 1
    while stop in graph.uncuttable:
        stop += 1
    return range(start, stop)


def _candidates(profile: Profile, nodes: Sequence[int]) -> list[int]:
    """Return the nodes that may be recomputed, those with the most saved bytes per second first."""
    graph = profile.graph
    buffers = {name for name, parameter in graph.parameters.items() if parameter.is_buffer}
    free = [n for n in nodes if profile.saved_bytes[n] > 0 and not buffers & set(graph.nodes[n].parameters)]
    return sorted(free, key=lambda n: -float(profile.saved_bytes[n]) / max(float(profile.forward[n]), 1e-12))


def _held(
    profile: Profile, stages: Sequence[int], counts: Floats, ranges: Sequence[range], chosen: Sequence[set[int]]
) -> float:
    """Return the peak bytes of saved values of a lane."""
    saved, pending = [], []
    for stage in stages:
        kept = [node for node in ranges[stage] if node not in chosen[stage]]
        runs = _runs(chosen[stage])
        inputs = sum(_input_bytes(profile, run) for run in runs)
        saved.append(float(profile.saved_bytes[kept].sum()) + inputs)
        pending.append(float(profile.pending_bytes[list(ranges[stage])].sum()))
    # a run that is being recomputed holds its saved values again; add the largest run
    again = max((float(profile.saved_bytes[list(run)].sum()) for s in stages for run in _runs(chosen[s])), default=0.0)
    moments = counts[:, 0] @ np.array(saved) + counts[:, 1] @ np.array(pending)
    return float(moments.max()) + again


def _input_bytes(profile: Profile, run: range) -> float:
    """Return the bytes of the inputs of a run, which it keeps to be recomputed."""
    graph = profile.graph
    found = 0.0
    for index in {value for node in run for value in graph.nodes[node].inputs}:
        value = graph.values[index]
        if 0 <= value.producer < run.start and not graph.nodes[value.producer].is_free:
            found += value.bytes_at(profile.batch_size)
    return found


def _runs(nodes: set[int]) -> tuple[range, ...]:
    """Group consecutive nodes into ranges.

    >>> _runs({1, 2, 5})
    (range(1, 3), range(5, 6))
    """
    runs: list[range] = []
    for node in sorted(nodes):
        if runs and runs[-1].stop == node:
            runs[-1] = range(runs[-1].start, node + 1)
        else:
            runs.append(range(node, node + 1))
    return tuple(runs)
