"""Actions and lanes: their text, their integers, and being equal."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.actions import MAX_MBS, MAX_STAGES, Action, Kind, Lane, decode

actions = st.builds(Action, st.sampled_from(list(Kind)), st.integers(0, MAX_STAGES - 1), st.integers(0, 2**31 - 1))


@given(actions)
def test_text_reads_back(action):
    assert Action.parse(str(action)) == action


@given(st.lists(actions))
def test_a_lane_holds_its_actions(items):
    lane = Lane.of(items)
    assert list(lane) == items
    assert lane == tuple(items)
    assert lane == Lane.of(str(lane))
    assert hash(lane) == hash(Lane.of(items))
    kinds, stages, mbs = decode(lane.codes)
    assert (stages.tolist(), mbs.tolist()) == ([a.stage for a in items], [a.mb for a in items])
    assert len(kinds) == len(items)


def test_a_lane_cannot_be_changed():
    lane = Lane.of("0F0 0B0")
    with pytest.raises(ValueError, match="read-only"):
        lane.codes[0] = 1
    assert lane[0] == Action(Kind.F, 0, 0)
    assert lane[-1:] == Lane.of("0B0")
    assert lane != Lane.of("0F0")
    assert lane != "0F0 0B0"


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0Q0", "0F0x", "0f0", "1.0F0", "0F-1", f"0F{MAX_MBS}", f"{MAX_STAGES}F0"]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError):
        Action.parse(text)


@pytest.mark.parametrize(
    "item", [Action(Kind.F, 0, MAX_MBS), Action(Kind.F, MAX_STAGES, 0), Action(Kind.F, 0, -1), ("Z", 0, 0), ("F", 0), 5]
)
def test_numbers_that_do_not_fit_are_refused(item):
    """The story: they wrapped around into other actions."""
    with pytest.raises(ScheduleError):
        Lane.of([item])


def test_a_lane_read_back_is_still_frozen():
    lane = copy.deepcopy(Lane.of("0F0 0B0"))
    assert not lane.codes.flags.writeable
    assert hash(lane) == hash(tuple(lane))


def test_every_kind_has_words():
    assert all(kind.words for kind in Kind)
