"""Asking for schedules by name: counts, options, aliases, one's own builders."""

import numpy as np
import pytest

from penstock import Costs, schedules
from penstock.errors import CostError, ScheduleError
from penstock.schedule.registry import Entry, Registry
from penstock.schedules import Schedule, build, describe, names

ALL = """
    gpipe 1f1b interleaved_1f1b looped_bfs zb_h1 zb_h2 zb_1p zb_2p zb_v v_half v_min dualpipe dualpipe_v chimera
    hanayo pipedream pipedream_2bw auto
""".split()  # noqa: SIM905 - easier to read against the docs


def test_all_schedules_are_there():
    assert set(ALL) <= set(names())


@pytest.mark.parametrize("name", ALL)
def test_every_schedule_says_what_it_is_and_where_it_comes_from(name):
    entry = describe(name)
    assert len(entry.summary) > 10
    assert entry.paper


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("ZBVZeroBubble", "zb_v"),
        ("DualPipeV", "dualpipe_v"),
        ("zb-h1", "zb_h1"),
    ],
)
def test_torchs_names_are_understood(asked, meant):
    assert build(asked, lanes=2, micro_batches=2).name == meant


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", None, True, 2**40])
def test_counts_must_be_whole_numbers_from_1(count):
    with pytest.raises(ScheduleError, match="lanes"):
        build("1f1b", lanes=count, micro_batches=2)
    with pytest.raises(ScheduleError, match="micro_batches"):
        build("1f1b", lanes=2, micro_batches=count)
    if count is not None:
        with pytest.raises(ScheduleError, match="stages_per_lane"):
            build("interleaved_1f1b", lanes=2, micro_batches=2, stages_per_lane=count)


def test_more_than_any_memory_holds_is_refused_at_once():
    with pytest.raises(ScheduleError, match="too many actions"):
        build("1f1b", lanes=100_000, micro_batches=100_000)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ScheduleError, match="Did you mean 'zb_h1'"):
        build("zb_h11", lanes=2, micro_batches=2)
    with pytest.raises(ScheduleError, match="must be a string"):
        build(None, lanes=2, micro_batches=2)


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
@pytest.mark.parametrize(("lanes", "instead"), [(1, "use 2"), (3, "use 2 or 4"), (7, "use 6 or 8")])
def test_odd_lanes_are_refused_with_what_would_do(name, lanes, instead):
    with pytest.raises(ScheduleError, match=instead):
        build(name, lanes=lanes, micro_batches=4)


def test_stages_per_lane_that_do_not_fit_are_refused():
    with pytest.raises(ScheduleError, match="1f1b has 1 stage"):
        build("1f1b", lanes=2, micro_batches=2, stages_per_lane=2)
    with pytest.raises(ScheduleError, match="zb_v has 2 stage"):
        build("zb_v", lanes=2, micro_batches=2, stages_per_lane=3)
    with pytest.raises(ScheduleError, match="use 2 or 4"):
        build("hanayo", lanes=2, micro_batches=2, stages_per_lane=3)
    assert build("zb_v", lanes=2, micro_batches=2, stages_per_lane=2).num_stages == 4


def test_a_group_smaller_than_the_lanes_is_refused():
    with pytest.raises(ScheduleError, match="use 4 or more"):
        build("pipedream_2bw", lanes=4, micro_batches=8, update_every=3)


def test_an_option_without_effect_is_refused():
    with pytest.raises(ScheduleError, match="1f1b does not take: wavess; its options: none"):
        build("1f1b", lanes=2, micro_batches=2, wavess=3)


def test_a_limit_needs_bytes_and_is_enforced():
    with pytest.raises(CostError, match="saved_bytes"):
        build("1f1b", lanes=2, micro_batches=4, memory_limit=10)
    costs = Costs(saved_bytes=5.0)
    assert build("1f1b", lanes=2, micro_batches=4, costs=costs, memory_limit=10)
    with pytest.raises(ScheduleError, match="memory"):
        build("gpipe", lanes=2, micro_batches=4, costs=costs, memory_limit=10)
    for wrong in (0, -1, float("nan"), [1, 2, 3], True, [True, 1], "16 apples", "-1GiB", ["1kB", {}]):
        with pytest.raises(CostError, match="memory_limit"):
            build("1f1b", lanes=2, micro_batches=4, costs=costs, memory_limit=wrong)


def test_a_limit_may_have_a_unit():
    """Only TOML took "1GiB"; Python said that it is not a number of bytes."""
    costs = Costs(saved_bytes=500.0)
    for limit in ("1kB", ["1000", "1kB"], [1000, "0.001 MB"]):
        assert build("1f1b", lanes=2, micro_batches=4, costs=costs, memory_limit=limit)
        with pytest.raises(ScheduleError, match="memory"):
            build("gpipe", lanes=2, micro_batches=4, costs=costs, memory_limit=limit)


def test_numpys_whole_numbers_are_whole_numbers():
    assert build("1f1b", lanes=np.int64(2), micro_batches=np.int32(3)) == build("1f1b", lanes=2, micro_batches=3)


def test_costs_must_be_as_many_as_stages():
    with pytest.raises(CostError, match=r"one per stage \(4 stages\)"):
        build("1f1b", lanes=4, micro_batches=2, costs=Costs(forward=[1, 2]))
    with pytest.raises(CostError, match=r"pass a penstock\.Costs"):
        build("1f1b", lanes=4, micro_batches=2, costs=5)


def test_what_is_no_builder_is_refused():
    for name, builder in (("q", 3), (5, by_hand)):
        with pytest.raises(ScheduleError, match="its name and a function"):
            schedules.register(name, builder)
    registry = Registry([Entry("none", lambda *, lanes, micro_batches: None, "returns nothing")])
    with pytest.raises(ScheduleError, match="must return a Schedule"):
        registry.build("none", lanes=1, micro_batches=1, options={})


def by_hand(*, lanes: int, micro_batches: int) -> Schedule:
    """Everything in turn."""
    return Schedule.of([[f"{s}{k}{m}" for m in range(micro_batches) for k in "FB"] for s in range(lanes)])


def test_ones_own_schedule():
    registry = Registry([])
    registry.register(Entry("mine", by_hand, "mine"))
    schedules.verify(registry.build("Mine", lanes=3, micro_batches=2, options={}))
    with pytest.raises(ScheduleError, match="taken"):
        registry.register(Entry("mine", by_hand, "mine"))
    with pytest.raises(ScheduleError, match="letters, digits"):
        registry.register(Entry("my schedule!", by_hand, "mine"))
    with pytest.raises(ScheduleError, match="lanes= and micro_batches="):
        registry.register(Entry("other", lambda x: None, "mine"))


def test_a_built_in_name_cannot_be_taken():
    for name in ("1f1b", "auto", "DualPipeV"):
        with pytest.raises(ScheduleError, match="taken"):
            schedules.register(name, by_hand)
