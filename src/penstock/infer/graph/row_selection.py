"""Rows: where a model asks for some rows of a result only, the others are not computed.

    gelu(x @ w)[:, 0]   becomes   gelu(x[:, 0] @ w)

A tower asks its last block for one token of many, a language model its head for the last word. What comes before and
treats rows one by one (norms, products with weights, whatever goes number by number, attention for its queries) need
not see the others. So a reader of rows moves up through the graph, as long as nobody reads the rest. What is computed
is the same; products of other sizes may be rounded in another order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx

from penstock.model.capture.export.traced_operations import Families, op_name

__all__ = ["asks_for_rows", "could_be_fewer", "for_fewer_rows"]

aten = torch.ops.aten
_END = sys.maxsize  # as torch writes an end that is left out
_MOST_SHARE = 0.5  # of rows: they lie apart in memory, and to gather nearly all of them is no gain


class Rows(NamedTuple):
    """Which rows are read of a tensor: as in a slice of one of its dimensions, counted from the front."""

    dim: int
    start: int
    end: int
    step: int

    def num_of(self, size: int) -> int:
        """Return how many these are of so many.

        >>> Rows(1, -1, _END, 1).num_of(5), Rows(0, 0, _END, 2).num_of(5)
        (1, 3)
        """
        return len(range(*slice(self.start, self.end, self.step).indices(size)))


Shapes = dict[fx.Node, tuple[torch.Size, ...]]  # of the plain tensor that a node makes, for each number of samples


@dataclass(frozen=True)
class _Seen:
    """A node, and what is known of the tensors around it.

    Attributes:
        node: whose rows are asked for.
        rows: which of them.
        shapes: of all tensors.
    """

    node: fx.Node
    rows: Rows
    shapes: Shapes

    @property
    def num_dims(self) -> int:
        """Of what the node makes."""
        return len(self.shapes[self.node][0])

    def given(self, at: int, default: Any = None) -> Any:  # noqa: ANN401 - whatever operations take
        """Return an argument by its place."""
        return self.node.args[at] if at < len(self.node.args) else default

    def num_dims_of(self, at: int) -> int:
        """Return how many dimensions an argument has."""
        return len(self.shapes[self.given(at)][0])


TrainerOptions = dict[int, int]  # by the place of an argument: the dimension of it that the rows are in
Rule = Callable[[_Seen], TrainerOptions | None]  # None: all rows are needed, or nobody knows


def asks_for_rows(node: fx.Node) -> bool:
    """Return whether a node reads rows of another, as a look at it tells."""
    return node.op == "call_function" and node.target in (aten.select.int, aten.slice.Tensor)


def for_fewer_rows(graph: fx.Graph, shown: Sequence[dict[fx.Node, Any]]) -> int:
    """Let operations work on the rows that are asked for; return how many do, those that only look not counted.

    Args:
        graph: is changed.
        shown: what each node makes, for several numbers of samples: only what is true for all of them is relied on.
            What comes in the place of others is added.
    """
    count = 0
    for node, rows, asked in _movable(graph, shown):
        for old, new in _move_up(graph, node, rows, asked):
            for one in shown:
                if old in one:  # and not a reader that was put there
                    one[new] = one[old]
        count += node.target not in _LOOKS
    return count


def could_be_fewer(graph: fx.Graph, shown: Mapping[fx.Node, Any]) -> bool:
    """Return whether some operation could work on fewer rows, as far as one number of samples tells."""
    return any(True for _ in _movable(graph, [shown]))


def _movable(graph: fx.Graph, shown: Sequence[Mapping[fx.Node, Any]]) -> Iterator[tuple[fx.Node, Rows, TrainerOptions]]:
    """Yield each node that needs some rows only, which ones, and where they are in its arguments; the last node first.

    Each is moved before the next is asked for.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(op_name(node).startswith("as_strided") for node in calls):  # which counts on where things are in memory
        return
    families, shapes = Families(calls), _shapes_in(graph, shown)
    for node in reversed(calls):  # its users come first, and may have moved up to it
        rows = _rows_read(node, shapes)
        if rows is None or families.is_changed(node):
            continue
        asked = _sources(_Seen(node, rows, shapes))
        if asked is not None and _pays(node, rows, asked, shapes, families):
            yield node, rows, asked


def _pays(node: fx.Node, rows: Rows, asked: TrainerOptions, shapes: Shapes, families: Families) -> bool:
    """Return whether less is computed: to look at less is no gain, but for what is computed before it."""
    if node.target not in _LOOKS:
        return True
    ((at, dim),) = asked.items()
    source, there = node.args[at], rows._replace(dim=dim)
    if not isinstance(source, fx.Node) or source.op != "call_function" or families.is_changed(source):
        return False
    if not all(user is node or _would_read(user, source, shapes) == there for user in source.users):
        return False
    further = _sources(_Seen(source, there, shapes))
    return further is not None and _pays(source, there, further, shapes, families)


def _would_read(user: fx.Node, source: fx.Node, shapes: Shapes) -> Rows | None:
    """Return which rows a user reads of its source, by itself or once its own readers have moved up to it."""
    rows = _rows_read(user, shapes)
    if rows is None or user.target not in _LOOKS:
        return _rows_of(user, len(shapes[source][0]))
    asked = _sources(_Seen(user, rows, shapes))
    return None if asked is None else rows._replace(dim=asked[0])


def _shapes_in(graph: fx.Graph, shown: Sequence[Mapping[fx.Node, Any]]) -> Shapes:
    """Return the shapes of all that is a plain tensor, with as many dimensions for any number of samples."""
    found: Shapes = {}
    for node in graph.nodes:
        made = [one.get(node) for one in shown]
        if all(isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided for tensor in made):
            shapes = tuple(tensor.shape for tensor in made)  # type: ignore[union-attr]
            if len({len(shape) for shape in shapes}) == 1:
                found[node] = shapes
    return found


def _rows_read(node: fx.Node, shapes: Shapes) -> Rows | None:
    """Return which rows all users of a node read; None where they read others, or most, or none."""
    if node not in shapes or not node.users:
        return None
    found = {_rows_of(user, len(shapes[node][0])) for user in node.users}
    rows = found.pop()
    if found or rows is None:
        return None
    sizes = {shape[rows.dim] for shape in shapes[node]}
    size = sizes.pop()
    return rows if not sizes and 0 < rows.num_of(size) <= _MOST_SHARE * size else None


def _rows_of(node: fx.Node, num_dims: int) -> Rows | None:
    """Return which rows of its first argument a node reads."""
    if not asks_for_rows(node) or node.kwargs:
        return None
    given: list[Any] = list(node.args[1:])
    if node.target is aten.select.int:
        given += [given[1] + 1 or _END] if type(given[1]) is int else [None]
    defaults = (0, 0, _END, 1)
    dim, start, end, step = (defaults[at] if value is None else value for at, value in zip_longest(range(4), given))
    is_known = all(type(number) is int for number in (dim, start, end, step))
    return Rows(dim % num_dims, start, end, step) if is_known else None


def _sources(seen: _Seen) -> TrainerOptions | None:
    """Return in which arguments of a node, and where in them, the rows are; None where it needs more than these."""
    target, node = seen.node.target, seen.node
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    if not seen.shapes.keys() >= set(node.all_input_nodes):  # numbers, nested graphs, other kinds of tensors
        return None
    if target in _RULES:
        return _RULES[target](seen)
    return _number_by_number(seen) if _goes_number_by_number(target) else None


def _goes_number_by_number(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def _move_up(graph: fx.Graph, node: fx.Node, rows: Rows, asked: TrainerOptions) -> list[tuple[fx.Node, fx.Node]]:
    """Let a node work on some rows of its arguments; return its readers, and what comes in the place of each."""
    args = list(node.args)
    with graph.inserting_before(node):
        for at, dim in asked.items():
            of: Any = node.args[at]
            args[at] = graph.call_function(aten.slice.Tensor, (of, dim, *rows[1:]))
        if node.target is aten.scaled_dot_product_attention.default and len(args) > _CAUSAL:
            args[_CAUSAL] = False  # the last query sees everything
        made = graph.call_function(node.target, tuple(args), node.kwargs)  # type: ignore[arg-type]
    replaced: list[tuple[fx.Node, fx.Node]] = []
    for reader in list(node.users):
        found = made
        if reader.target is aten.select.int:
            with graph.inserting_before(reader):
                found = graph.call_function(aten.select.int, (made, rows.dim, 0))
        reader.replace_all_uses_with(found)
        replaced.append((reader, found))
        graph.erase_node(reader)
    graph.erase_node(node)
    return replaced


# ---- one rule for each kind of operation


def _number_by_number(seen: _Seen) -> TrainerOptions | None:
    """Tensors are broadcast against each other: rows are in those that have them."""
    places = [at for at, value in enumerate(seen.node.args) if isinstance(value, fx.Node)]
    if len({seen.node.args[at] for at in places}) < len(seen.node.all_input_nodes):  # others are in a list
        return None
    shapes = {at: seen.shapes[seen.given(at)] for at in places}
    for which, whole in enumerate(seen.shapes[seen.node]):
        if torch.broadcast_shapes(*(shape[which] for shape in shapes.values())) != whole:  # type: ignore[no-untyped-call]
            return None
    found: TrainerOptions = {}
    for at in places:
        dim = seen.rows.dim - (seen.num_dims - seen.num_dims_of(at))
        sizes = {shape[dim] for shape in shapes[at]} if dim >= 0 else {1}
        if sizes != {1}:
            found[at] = dim
    return found


def _same(seen: _Seen) -> TrainerOptions:
    return {0: seen.rows.dim}


def _norm(seen: _Seen) -> TrainerOptions | None:
    return _same(seen) if seen.rows.dim < seen.num_dims - len(seen.given(1)) else None


def _linear(seen: _Seen) -> TrainerOptions | None:
    if seen.given(2) is not None and seen.num_dims_of(2) > 1:  # a bias for each row
        return None
    return _same(seen) if seen.rows.dim < seen.num_dims - 1 else None


def _product(seen: _Seen) -> TrainerOptions | None:
    """A row of a product of matrices is a row of the first times the second."""
    left, right = seen.num_dims_of(0), seen.num_dims_of(1)
    if left < 2 or right < 2:
        return None
    if seen.rows.dim == seen.num_dims - 2:
        return {0: left - 2}
    return _same(seen) if right == 2 and seen.rows.dim < seen.num_dims - 2 else None


def _along(seen: _Seen) -> TrainerOptions | None:
    """What works along one dimension, or several that stay, treats those beside it one by one."""
    dims = seen.given(1)
    if seen.node.target is not aten.softmax.int and seen.given(2) is not True:
        return None
    along = {dim % seen.num_dims for dim in ([dims] if isinstance(dims, int) else dims or range(seen.num_dims))}
    return None if seen.rows.dim in along else _same(seen)


def _attention(seen: _Seen) -> TrainerOptions | None:
    """A query looks at all keys, and at no other query; one that looks back only, at all of them if it is the last."""
    names = {"attn_mask": 3, "dropout_p": 4, "is_causal": _CAUSAL}
    given = {name: seen.node.kwargs.get(name, seen.given(at)) for name, at in names.items()}
    if seen.rows.dim != seen.num_dims - 2 or given["attn_mask"] is not None or given["dropout_p"]:
        return None
    if given["is_causal"]:
        queries, keys = ([shape[-2] for shape in seen.shapes[seen.given(at)]] for at in (0, 1))
        if seen.rows[1:] != (-1, _END, 1) or queries != keys or "is_causal" in seen.node.kwargs:
            return None
    return {0: seen.num_dims_of(0) - 2}


def _transpose(seen: _Seen) -> TrainerOptions:
    first, second = (dim % seen.num_dims for dim in (seen.given(1), seen.given(2)))
    return {0: {first: second, second: first}.get(seen.rows.dim, seen.rows.dim)}


def _permute(seen: _Seen) -> TrainerOptions:
    return {0: seen.given(1)[seen.rows.dim] % seen.num_dims}


def _flatten(seen: _Seen) -> TrainerOptions | None:
    num_dims = seen.num_dims_of(0)
    if num_dims == 0:
        return None
    first, last = (dim % num_dims for dim in (seen.given(1, 0), seen.given(2, -1)))
    if seen.rows.dim == first and first != last:
        return None
    return {0: seen.rows.dim if seen.rows.dim <= first else seen.rows.dim + last - first}


def _unsqueeze(seen: _Seen) -> TrainerOptions | None:
    new = seen.given(1) % seen.num_dims
    return None if seen.rows.dim == new else {0: seen.rows.dim - (seen.rows.dim > new)}


def _slice(seen: _Seen) -> TrainerOptions | None:
    other = _rows_of(seen.node, seen.num_dims)
    return None if other is None or other.dim == seen.rows.dim else _same(seen)


def _select(seen: _Seen) -> TrainerOptions | None:
    other = _rows_of(seen.node, seen.num_dims + 1)
    return None if other is None else {0: seen.rows.dim + (seen.rows.dim >= other.dim)}


def _dropout(seen: _Seen) -> TrainerOptions | None:
    return _same(seen) if seen.given(2) is False else None


_CAUSAL = 5  # the place of that argument
_RULES: dict[object, Rule] = {
    aten.linear.default: _linear,
    aten.matmul.default: _product,
    aten.bmm.default: _product,
    aten.mm.default: _product,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.softmax.int: _along,
    aten.mean.dim: _along,
    aten.sum.dim_IntList: _along,
    aten.scaled_dot_product_attention.default: _attention,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.flatten.using_ints: _flatten,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.dropout.default: _dropout,
    aten.contiguous.default: _same,
    aten.to.dtype: _same,
}
_LOOKS = frozenset(
    {
        aten.transpose.int,
        aten.permute.default,
        aten.flatten.using_ints,
        aten.unsqueeze.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.dropout.default,
        aten.contiguous.default,
    }
)
