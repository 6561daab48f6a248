"""Partition: equal to brute force on every small graph, whatever the lanes, links, memory and constraints."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partition_cases import Oracle, clusters, profiles
from penstock import schedules
from penstock.errors import PartitionError
from penstock.planning.partition.partition import partition
from penstock.schedule.schedule import Schedule

ONE_EACH = [("1f1b", 2), ("1f1b", 3), ("1f1b", 4), ("gpipe", 3), ("zb_h1", 3), ("zb_h2", 2), ("pipedream", 2)]
SEVERAL = [("interleaved_1f1b", 2), ("looped_bfs", 2), ("zb_v", 2), ("v_min", 2), ("dualpipe_v", 2), ("hanayo", 2)]
BOTH_WAYS = [("chimera", 2), ("chimera", 4), ("dualpipe", 2), ("dualpipe", 4)]


def check(data, schedule, profile, *, keeps=("hold", "recompute")):
    """Hold one random case against the oracle."""
    keep = data.draw(st.sampled_from(keeps))
    transfers = data.draw(st.sampled_from(["waited", "hidden"]))
    cluster = data.draw(clusters(schedule.num_lanes))
    oracle = Oracle(profile, schedule, cluster, keep=keep, waits=transfers == "waited")
    cuts = oracle.all_cuts()
    assume(cuts)
    forced = data.draw(st.sets(st.sampled_from(range(1, len(profile.graph.nodes))), max_size=1))
    forced &= set(data.draw(st.sampled_from(cuts)))
    some = oracle.lane_bytes(data.draw(st.sampled_from(cuts)))
    slack = data.draw(st.sampled_from([0.5, 0.9, 1.0, 1.2, float("inf")]))
    limits = [slack if slack == float("inf") else max(slack * used, 0.5) for used in some]
    asked = {"schedule": schedule, "cluster": cluster, "keep": keep, "transfers": transfers, "cuts_at": sorted(forced)}
    asked["memory_limit"] = None if slack == float("inf") else limits
    best = oracle.best(limits, forced=forced)
    if best is None:
        with pytest.raises(PartitionError, match="memory"):
            partition(profile, **asked)
        return
    found = partition(profile, **asked)
    assert found.period_seconds == pytest.approx(best[1], rel=1e-8, abs=1e-12)
    assert found.period_seconds == pytest.approx(oracle.period(found.cuts), rel=1e-8, abs=1e-12)
    assert found.is_proved
    assert found.gap == 0
    assert list(found.lane_bytes) == pytest.approx(oracle.lane_bytes(found.cuts))
    assert found.cuts == best[0]


@settings(deadline=None, max_examples=120)
@given(data=st.data(), profile=profiles(), which=st.sampled_from(ONE_EACH), mbs=st.integers(1, 6))
def test_one_stage_a_lane_equals_brute_force(data, profile, which, mbs):
    check(data, schedules.build(which[0], lanes=which[1], micro_batches=mbs), profile)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(data=st.data(), profile=profiles(), which=st.sampled_from(SEVERAL))
def test_several_stages_a_lane_equal_brute_force(data, profile, which):
    check(data, schedules.build(which[0], lanes=which[1], micro_batches=4), profile)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), profile=profiles(), which=st.sampled_from(BOTH_WAYS))
def test_stages_on_two_lanes_equal_brute_force(data, profile, which):
    check(data, schedules.build(which[0], lanes=which[1], micro_batches=8), profile, keeps=("hold",))


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(
    data=st.data(), profile=profiles(), lane_of=st.sampled_from([(1, 0), (2, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 2, 0)])
)
def test_any_placement_equals_brute_force(data, profile, lane_of):
    lanes = [
        " ".join(
            f"{s}{kind}{mb}" for mb in range(2) for kind in "FB" for s in range(len(lane_of)) if lane_of[s] == lane
        )
        for lane in range(1 + max(lane_of))
    ]
    schedule = Schedule.of(lanes)
    check(data, schedule, profile, keeps=("hold",))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), profile=profiles())
def test_groups_stay_together(data, profile):
    nodes = len(profile.graph.nodes)
    group = data.draw(st.lists(st.integers(0, nodes - 1), min_size=2, max_size=3, unique=True))
    schedule = schedules.build("1f1b", lanes=2, micro_batches=2)
    from penstock import Cluster

    oracle = Oracle(profile, schedule, Cluster(), waits=True)
    best = oracle.best([np.inf] * 2, apart=range(min(group) + 1, max(group) + 1))
    if best is None:
        with pytest.raises(PartitionError, match="request fewer stages"):
            partition(profile, schedule=schedule, together=[group])
        return
    found = partition(profile, schedule=schedule, together=[group])
    assert found.cuts == best[0]
    assert found.period_seconds == pytest.approx(best[1])
