"""Costs: defaults, one number or one a stage, and what is refused."""

import numpy as np
import pytest

from penstock import Cluster, Costs, Link
from penstock.errors import CostError


def columns(**given):
    costs = Costs(**given).for_stages(2)
    return costs.forward.tolist(), costs.input_grad.tolist(), costs.weight_grad.tolist(), costs.backward.tolist()


def test_defaults():
    assert columns() == ([1, 1], [1, 1], [1, 1], [2, 2])
    assert columns(forward=3) == ([3, 3], [3, 3], [3, 3], [6, 6])
    assert columns(forward=1, backward=[2, 5]) == ([1, 1], [1, 2.5], [1, 2.5], [2, 5])
    assert columns(input_grad=2, weight_grad=1) == ([1, 1], [2, 2], [1, 1], [3, 3])
    assert columns(backward=5, input_grad=2) == ([1, 1], [2, 2], [3, 3], [5, 5])
    assert columns(backward=5, weight_grad=2) == ([1, 1], [3, 3], [2, 2], [5, 5])
    assert columns(backward=5, input_grad=4, weight_grad=3) == ([1, 1], [4, 4], [3, 3], [5, 5])
    assert columns(input_grad=2) == ([1, 1], [2, 2], [2, 2], [4, 4])
    assert columns(weight_grad=2) == ([1, 1], [2, 2], [2, 2], [4, 4])


def test_what_is_pending_is_what_was_saved_unless_said_otherwise():
    assert Costs(saved_bytes=[4, 8]).for_stages(2).pending_bytes.tolist() == [4, 8]
    assert Costs(saved_bytes=4, pending_bytes=1).for_stages(2).pending_bytes.tolist() == [1, 1]
    assert Costs().for_stages(2).saved_bytes.tolist() == [0, 0]


def test_arrays_are_taken_and_frozen():
    given = np.array([1.0, 2.0])
    costs = Costs(forward=given)
    given[0] = 9.0
    assert costs.forward == (1.0, 2.0)
    assert Costs(forward=np.float64(2.0)).forward == 2.0
    assert hash(costs) == hash(Costs(forward=[1.0, 2.0]))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -1, "2", True, None, [1, float("nan")], [], [1, "x"], {}, 10**400]
)
def test_wrong_numbers_are_refused_with_their_place(value):
    with pytest.raises(CostError, match="forward"):
        Costs(forward=value)


def test_all_faults_are_listed():
    with pytest.raises(CostError, match=r"forward: -1 .*; transfer: nan"):
        Costs(forward=-1, transfer=float("nan"))
    with pytest.raises(CostError, match=r"different lengths: forward: 2, backward: 3"):
        Costs(forward=[1, 2], backward=[1, 2, 3])


def test_a_part_that_is_more_than_the_whole_is_refused():
    for part in ("input_grad", "weight_grad"):
        with pytest.raises(CostError, match=f"{part}: 5 is more than backward"):
            Costs(backward=2, **{part: 5})
    assert Costs(backward=2, input_grad=2, weight_grad=2)  # a whole backward may be cheaper than its parts


def test_any_sequence_of_numbers_is_taken():
    assert Costs(forward=range(1, 3)).forward == (1, 2)
    assert Costs(forward=[np.array(1.0), np.float32(2.0)]).forward == (1.0, 2.0)


def test_tensors_are_taken():
    torch = pytest.importorskip("torch")
    assert Costs(forward=torch.tensor([1.0, 2.0])).forward == (1.0, 2.0)


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf"), [1, 0], "fast", np.array([1.0, -1.0])])
def test_wrong_speeds_are_refused(speed):
    with pytest.raises(CostError, match="speed"):
        Cluster(speed=speed)


def test_wrong_links_are_refused():
    with pytest.raises(CostError, match="latency_seconds: -1"):
        Link(latency_seconds=-1)
    for rate in (0, -5, float("nan"), "1", None):
        with pytest.raises(CostError, match="bytes_per_second"):
            Link(bytes_per_second=rate)
    with pytest.raises(CostError, match="shared_as"):
        Link(shared_as="")
    for links in ({(0, 1, 2): Link()}, {(0, 1): 5}, {("a", 1): Link()}, None, [Link()]):
        with pytest.raises(CostError, match="from lane, to lane"):
            Cluster(links=links)
