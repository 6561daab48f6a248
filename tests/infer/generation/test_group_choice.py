"""The number of groups follows from measured rounds."""

from penstock.infer.generation.group_choice import GroupChoice


def run(seconds_of, *, rounds=20, num_requests=4, lanes=2):
    """Run rounds that take `seconds_of[groups]`; return the number of groups of each round."""
    choice, groups, found = GroupChoice(lanes), lanes, []
    for at in range(rounds):
        found.append(groups)
        choice.note(num_requests, groups, seconds_of[groups])
        best = choice.best(num_requests, 100 - at)
        if best not in (None, groups):
            groups = best
            choice.restart()
    return found


def test_the_fastest_number_stays():
    assert run({2: 1.0, 1: 0.7})[-1] == 1
    assert run({2: 1.0, 1: 1.2})[-1] == 2
    assert run({4: 1.0, 5: 0.9, 1: 2.0}, num_requests=8, lanes=4)[-1] == 5


def test_a_number_that_is_much_slower_runs_for_one_round():
    assert run({2: 1.0, 1: 1.2}).count(1) == 3
    assert run({2: 1.0, 1: 3.0}).count(1) == 1


def test_nothing_is_tried_shortly_before_the_end():
    choice = GroupChoice(2)
    assert choice.best(4, 5) is None
    for _ in range(3):
        choice.note(4, 2, 1.0)
    assert choice.best(4, 5) == 2
    assert choice.best(4, 50) == 1
