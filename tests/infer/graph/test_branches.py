"""Branches: long parallel paths get streams of their own, short ones do not; waits keep every order that matters."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import GraphError
from penstock.infer.graph.branches import Branches, GraphNode, find_branches
from penstock.infer.graph.graph_replay import ShapeCache

KERNEL = 5e-6


def chain(nodes, length, after=(), name="n", seconds=KERNEL):
    """Add a chain of kernels to a list of nodes; return the place of the last."""
    for _ in range(length):
        nodes.append(GraphNode(f"{name}{len(nodes)}", tuple(after), seconds))
        after = (len(nodes) - 1,)
    return len(nodes) - 1


def towers(*lengths):
    """Return towers of so many kernels, one after the other in the order of the model, joined by a last node."""
    nodes = []
    ends = [chain(nodes, length, name=f"tower {number}, node ") for number, length in enumerate(lengths)]
    nodes.append(GraphNode("join", tuple(ends), KERNEL))
    return nodes


def streams_of(nodes, branches):
    """Return the streams on which the nodes of each tower are."""
    found = {}
    for node, stream in zip(nodes, branches.stream_of, strict=True):
        found.setdefault(node.name.split(",")[0], set()).add(stream)
    return found


def is_behind(branches, later, earlier):
    """Say by brute force whether a node runs after another one: by the order of its stream and by waits alone."""
    todo, seen = [later], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        todo += branches.waits[at]
        todo += [i for i in range(at) if branches.stream_of[i] == branches.stream_of[at]][-1:]
    return earlier in seen - {later}


def test_a_chain_stays_on_one_stream():
    nodes = []
    chain(nodes, 30)
    assert find_branches(nodes).num_streams == 1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_towers_have_a_stream_each(count):
    nodes = towers(*range(20, 20 + count))
    branches = find_branches(nodes)
    assert branches.num_streams == count
    found = streams_of(nodes, branches)
    assert all(len(streams) == 1 for streams in found.values())
    assert len({min(found[f"tower {number}"]) for number in range(count)}) == count
    assert sum(map(len, branches.waits)) == count - 1  # the join waits once for each tower but its own
    assert branches.seconds < 0.7 * branches.total_seconds


def test_there_are_no_more_branches_than_asked_for():
    nodes = towers(20, 20, 20, 20)
    assert find_branches(nodes, most=1).num_streams == 1
    assert find_branches(nodes, most=2).num_streams == 2
    assert find_branches(towers(*[20] * 12)).num_streams == 8


def test_short_branches_are_not_worth_a_fork():
    """The keys and values of an attention: three nodes beside the query, in every layer."""
    nodes = []
    end = chain(nodes, 2)
    for _ in range(12):
        sides = [chain(nodes, 3, after=(end,)) for _ in range(3)]
        nodes.append(GraphNode(f"attention{len(nodes)}", tuple(sides), KERNEL))
        end = chain(nodes, 4, after=(len(nodes) - 1,))
    branches = find_branches(nodes)
    assert branches.num_streams == 1
    assert not any(branches.waits)


def test_a_long_branch_of_views_is_no_work():
    nodes = []
    end = chain(nodes, 20)
    other = chain(nodes, 20, seconds=0.0)
    nodes.append(GraphNode("join", (end, other), KERNEL))
    assert find_branches(nodes).num_streams == 1


def test_a_fork_that_saves_nothing_is_not_made():
    """Eight quick kernels beside one that takes long are not worth it if they have to wait for it anyway."""
    nodes = [GraphNode("long", (), 1e-3)]
    chain(nodes, 10, after=(0,), seconds=1e-6)
    assert find_branches(nodes).num_streams == 1


def test_what_lies_beside_a_path_goes_where_it_is_used():
    """Towers of attention layers: each on one stream as a whole, with all that lies beside its longest path."""
    nodes = [GraphNode("mask", (), KERNEL)]
    ends = []
    for tower in ("tower 0", "tower 1"):
        end = chain(nodes, 1, name=f"{tower}, node ")
        for _ in range(6):
            query, key = (chain(nodes, 2, after=(end,), name=f"{tower}, node ") for _ in range(2))
            view = chain(nodes, 1, after=(0,), name=f"{tower}, node ", seconds=0.0)
            nodes.append(GraphNode(f"{tower}, attention{len(nodes)}", (query, key, view), 2 * KERNEL))
            end = len(nodes) - 1
        ends.append(end)
    nodes.append(GraphNode("join", tuple(ends), KERNEL))
    branches = find_branches(nodes)
    found = streams_of(nodes, branches)
    assert sorted(map(sorted, (found["tower 0"], found["tower 1"]))) == [[0], [1]]
    assert sum(map(len, branches.waits)) == 2  # one tower for the mask, and the join


def test_streams_are_used_again():
    """Two forks one after the other, as in a net of many such blocks, need two streams, not three."""
    nodes, end = [], ()
    for _ in range(2):
        ends = [chain(nodes, 12, after=end) for _ in range(2)]
        nodes.append(GraphNode(f"join{len(nodes)}", tuple(ends), KERNEL))
        end = (len(nodes) - 1,)
    branches = find_branches(nodes)
    assert branches.num_streams == 2
    assert branches.seconds < 0.65 * branches.total_seconds


def test_waits_are_not_said_twice():
    """Who is behind a node is behind all that it was behind."""
    nodes = [
        GraphNode("a"),
        GraphNode("b", (0,)),
        GraphNode("c", (0, 1)),
        GraphNode("d", (0, 1, 2)),
        GraphNode("e", (1, 3)),
    ]
    branches = Branches(tuple(nodes), (0, 1, 2, 2, 0))
    assert branches.waits == ((), (0,), (1,), (), (3,))
    assert branches.awaited == {0, 1, 3}
    assert branches.crossing == {0, 1, 3}


def test_the_estimate_counts_what_overlaps_and_what_waits():
    nodes = (GraphNode("a", (), 4e-6), GraphNode("b", (), 6e-6), GraphNode("c", (0, 1), 1e-6))
    assert Branches(nodes, (0, 0, 0)).seconds == pytest.approx(11e-6)
    switch = 2e-6  # the fork, and the wait of c for b
    assert Branches(nodes, (0, 1, 0)).seconds == pytest.approx(6e-6 + 2 * switch + 1e-6)


def test_text():
    text = find_branches(towers(30, 20)).to_text()
    assert text.splitlines()[0].split() == ["branch", "nodes", "kernels", "share", "of", "the", "work"]
    assert [line.split() for line in text.splitlines()[1:]] == [["0", "31", "31", "61%"], ["1", "20", "20", "39%"]]


def test_nothing_at_all():
    assert find_branches([]).num_streams == 1
    assert find_branches([]).seconds == 0
    assert "0%" in find_branches([]).to_text()


def test_wrong_data_is_refused():
    with pytest.raises(GraphError, match="a node that does not come before it"):
        Branches((GraphNode("a", (0,)),), (0,))
    with pytest.raises(GraphError, match="without a gap"):
        Branches((GraphNode("a"), GraphNode("b")), (0, 2))
    with pytest.raises(GraphError, match="nodes: 1, but streams are given for 2"):
        Branches((GraphNode("a"),), (0, 0))


@st.composite
def graphs(draw, most=40):
    count = draw(st.integers(1, most))
    nodes = []
    for index in range(count):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        nodes.append(GraphNode(f"n{index}", tuple(sorted(after)), draw(st.sampled_from([0.0, 1e-6, 5e-6, 5e-5]))))
    return nodes


@given(graphs(), st.data())
@settings(max_examples=150, deadline=None)
def test_every_node_comes_behind_what_it_needs(nodes, data):
    """Whatever streams nodes are on: the waits alone keep the order, and none of them could be left out."""
    chosen = data.draw(st.lists(st.integers(0, 3), min_size=len(nodes), max_size=len(nodes)))
    renamed = {stream: number for number, stream in enumerate(dict.fromkeys(chosen))}
    branches = Branches(tuple(nodes), tuple(renamed[stream] for stream in chosen))
    for index, node in enumerate(nodes):
        assert all(is_behind(branches, index, before) for before in node.after)
        assert all(branches.stream_of[before] != branches.stream_of[index] for before in branches.waits[index])


@given(graphs(most=60))
@settings(max_examples=100, deadline=None)
def test_what_is_found_is_never_slower_than_one_stream(nodes):
    branches = find_branches(nodes)
    assert branches.seconds <= branches.total_seconds * (1 + 1e-9)
    assert branches == find_branches(nodes)


# ---- what is kept for each shape


def test_shapes_beyond_the_room_wait_until_one_has_rested():
    shapes = ShapeCache(most=2, rest_calls=3)
    for shape in "ab":
        assert shapes.get(shape) is None
        assert shapes.has_space
        shapes.put(shape, shape.upper())
    assert shapes.get("c") is None
    assert not shapes.has_space
    for _ in range(3):
        assert shapes.get("a") == "A"
    assert shapes.has_space  # b has not been used for a while
    shapes.put("c", "C")
    assert (shapes.get("a"), shapes.get("b"), shapes.get("c")) == ("A", None, "C")


def test_shapes_that_take_turns_do_not_drive_each_other_out():
    shapes = ShapeCache(most=2, rest_calls=8)
    made = []
    for call in range(60):
        shape = call % 3
        if shapes.get(shape) is None and shapes.has_space:
            shapes.put(shape, shape)
            made.append(shape)
    assert made == [0, 1]
