"""Profile: checks itself, sums up to stages, counts parameters once, and comes back from its file."""

import json

import numpy as np
import pytest

from partition_cases import chain_graph, profile_of, value
from penstock.errors import CostError, GraphError, OutputError
from penstock.model.graph import Graph, Node, Parameter
from penstock.model.profile import Profile


def test_costs_are_sums_and_what_crosses():
    profile = profile_of(chain_graph([5, 6, 7, 8]), [3, 6, 9, 12], saved=2, pending=1, batch_size=10)
    costs = profile.costs([1, 3])
    assert costs.forward == costs.input_grad == costs.weight_grad == (1, 5, 4)
    assert costs.backward == (2, 10, 8)
    assert costs.saved_bytes == (2, 4, 2)
    assert costs.pending_bytes == (1, 2, 1)
    assert costs.output_bytes == (50, 70, 0)
    assert costs.input_bytes == (0, 50, 70)
    with pytest.raises(GraphError, match="cut 9 lies outside"):
        profile.costs([9])


def test_a_skip_crosses_every_cut_on_its_way_and_what_is_free_none():
    values = (
        value("in", -1, 1),
        value("a", 0, 10),
        value("mask", 1, 100),
        value("b", 2, 20, has_grad=False),
        value("c", 3, 1),
    )
    nodes = (
        Node("a", "op", "", (0,), (1,)),
        Node("mask", "op", "", (0,), (2,), is_free=True),
        Node("b", "op", "", (1, 2), (3,)),
        Node("c", "op", "", (1, 2, 3), (4,)),
    )
    profile = profile_of(Graph(nodes, values, (0,), (4,)), [1, 1, 1, 1])
    assert profile.crossing_bytes.tolist() == [0, 10, 10, 30, 1]
    assert profile.crossing_grad_bytes.tolist() == [0, 10, 10, 10, 1]


def test_parameters_count_once_and_only_trainable_ones_have_gradients():
    graph = chain_graph([1, 1, 1])
    parameters = {"w": Parameter("w", 100), "frozen": Parameter("frozen", 10, is_trainable=False)}
    nodes = tuple(
        Node(n.name, n.op, n.module, n.inputs, n.outputs, names)
        for n, names in zip(graph.nodes, (("w", "frozen"), ("frozen",), ("w",)), strict=True)
    )
    profile = profile_of(Graph(nodes, graph.values, (0,), (3,), parameters), [1, 1, 1], optimizer_bytes=2.0)
    assert profile.weight_bytes(range(3)) == 110
    assert profile.grad_bytes(range(3)) == 100
    assert profile.state_bytes(range(3)) == 410
    assert profile.state_bytes([1]) == 10
    assert profile.state_bytes([0]) == profile.state_bytes([0, 2]) == 410


def test_all_faults_are_listed():
    graph = chain_graph([1, 1])
    with pytest.raises(CostError) as error:
        Profile(graph, 0, [1, 2, 3], [1, -1], ["x", 1], [np.nan, np.inf], [0, 0], optimizer_bytes=-1)
    for part in (
        "forward: pass one number per node (2 nodes); given: 3",
        "input_grad of node n1: -1.0 must be finite and not negative",
        "weight_grad: pass one number per node",
        "saved_bytes of node n0: nan must be finite and not negative (and 1 more)",
        "batch_size: 0 must be at least 1",
        "optimizer_bytes: -1 must be finite and not negative",
    ):
        assert part in str(error.value)
    with pytest.raises(CostError, match=r"batch_size: 1.5 is not a whole number; optimizer_bytes: '2' is not a number"):
        profile_of(graph, [1, 1], batch_size=1.5, optimizer_bytes="2")


def test_columns_are_copies_that_cannot_be_changed():
    given = np.array([1.0, 2.0])
    profile = profile_of(chain_graph([1, 1]), [1, 1], forward=given)
    given[0] = 9
    assert profile.forward.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        profile.forward[0] = 3


def test_it_comes_back_from_its_file(tmp_path):
    graph = chain_graph([5, 6, 7], parameters=[1, 2, 3])
    profile = profile_of(graph, [1, 2, 3.3], saved=4, device="a device", method="analytic", optimizer_bytes=1.5)
    profile.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json", graph)
    for name in ("forward", "input_grad", "weight_grad", "saved_bytes", "pending_bytes"):
        assert getattr(again, name).tolist() == getattr(profile, name).tolist()
    assert (again.batch_size, again.optimizer_bytes, again.device, again.method) == (1, 1.5, "a device", "analytic")
    with pytest.raises(OutputError):
        profile.save(tmp_path / "none" / "profile.json")


def test_a_file_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "profile.json"
    graph = chain_graph([5, 6, 7])
    with pytest.raises(CostError, match="cannot be read as a profile"):
        Profile.load(path, graph)
    profile_of(graph, [1, 2, 3]).save(path)
    with pytest.raises(
        CostError, match="was measured for another graph; nodes there: 3, here: 4; profile the model again"
    ):
        Profile.load(path, chain_graph([5, 6, 7, 8]))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"forward": [1, 2, -3]}))
    with pytest.raises(CostError, match="forward of node n2"):
        Profile.load(path, graph)
    for wrong in ("[]", '{"format": "other"}', "{", json.dumps({"format": content["format"]})):
        path.write_text(wrong)
        with pytest.raises(CostError, match=r"is not a profile|cannot be read"):
            Profile.load(path, graph)
