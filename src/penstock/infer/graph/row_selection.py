"""Row selection: if a model reads only some rows of a result, the other rows are not computed.

    gelu(x @ w)[:, 0]   becomes   gelu(x[:, 0] @ w)

A tower reads one token of its last block, and a language model reads the last word of its head. The operations before
it that treat rows independently (norms, products with weights, elementwise operations, attention with respect to its
queries) need only these rows. So the operation that reads the rows moves up through the graph, as long as nothing else
uses the other rows. The computation is the same, but products of other sizes may be rounded in another order.
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

aten = torch.ops.aten
_END = sys.maxsize  # torch's value for an omitted end
_MOST_SHARE = 0.5  # share of rows: gathering nearly all of them gains nothing


class Rows(NamedTuple):
    """The rows that are read of a tensor: a slice of one dimension, counted from the front."""

    dim: int
    start: int
    end: int
    step: int

    def num_of(self, size: int) -> int:
        """Return the number of these rows in a dimension of this size.

        >>> Rows(1, -1, _END, 1).num_of(5), Rows(0, 0, _END, 2).num_of(5)
        (1, 3)
        """
        return len(range(*slice(self.start, self.end, self.step).indices(size)))


Shapes = dict[fx.Node, tuple[torch.Size, ...]]  # of each node's tensor, one for each batch size


@dataclass(frozen=True)
class _NodeRows:
    """A node, the rows that are read of it, and the shapes of all tensors."""

    node: fx.Node
    rows: Rows
    shapes: Shapes

    @property
    def num_dims(self) -> int:
        """The number of dimensions of the node's result."""
        return len(self.shapes[self.node][0])

    def given(self, at: int, default: Any = None) -> Any:  # noqa: ANN401 - any argument
        """Return an argument by its position."""
        return self.node.args[at] if at < len(self.node.args) else default

    def num_dims_of(self, at: int) -> int:
        """Return the number of dimensions of an argument."""
        return len(self.shapes[self.given(at)][0])


RowDims = dict[int, int]  # argument position -> the dimension of the rows in it
Rule = Callable[[_NodeRows], RowDims | None]  # None: all rows are needed, or it is unknown


def reads_rows(node: fx.Node) -> bool:
    """Return whether a node reads rows of another."""
    return node.op == "call_function" and node.target in (aten.select.int, aten.slice.Tensor)


def use_fewer_rows(graph: fx.Graph, values: Sequence[dict[fx.Node, Any]]) -> int:
    """Make operations compute only the rows that are read; return their number, without views.

    There is one dict of values per batch size. Only facts that hold for all are used. New nodes are added.
    """
    count = 0
    for node, rows, row_dims in _movable(graph, values):
        for old, new in _move_up(graph, node, rows, row_dims):
            for one in values:
                if old in one:  # not if this change inserted it
                    one[new] = one[old]
        count += node.target not in _VIEWS
    return count


def can_use_fewer_rows(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> bool:
    """Return whether some operation could compute fewer rows, judged by one batch size."""
    return any(True for _ in _movable(graph, [values]))


def _movable(graph: fx.Graph, values: Sequence[Mapping[fx.Node, Any]]) -> Iterator[tuple[fx.Node, Rows, RowDims]]:
    """Yield each node that needs only some rows, the rows, and their dimensions in its arguments; the last node first.

    The caller moves each node before it requests the next.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    if any(op_name(node).startswith("as_strided") for node in calls):  # depends on the memory layout
        return
    families, shapes = Families(calls), _shapes_in(graph, values)
    for node in reversed(calls):  # users come first, and may have moved up to it
        rows = _rows_read(node, shapes)
        if rows is None or families.is_changed(node):
            continue
        row_dims = _sources(_NodeRows(node, rows, shapes))
        if row_dims is not None and _saves_work(node, rows, row_dims, shapes, families):
            yield node, rows, row_dims


def _saves_work(node: fx.Node, rows: Rows, row_dims: RowDims, shapes: Shapes, families: Families) -> bool:
    """Return whether this saves computation: a view saves none itself, but the node before it may."""
    if node.target not in _VIEWS:
        return True
    ((at, dim),) = row_dims.items()
    source, there = node.args[at], rows._replace(dim=dim)
    if not isinstance(source, fx.Node) or source.op != "call_function" or families.is_changed(source):
        return False
    if not all(user is node or _rows_after_move(user, source, shapes) == there for user in source.users):
        return False
    further = _sources(_NodeRows(source, there, shapes))
    return further is not None and _saves_work(source, there, further, shapes, families)


def _rows_after_move(user: fx.Node, source: fx.Node, shapes: Shapes) -> Rows | None:
    """Return the rows that a user reads of its source, now or after its own readers have moved up to it."""
    rows = _rows_read(user, shapes)
    if rows is None or user.target not in _VIEWS:
        return _rows_of(user, len(shapes[source][0]))
    row_dims = _sources(_NodeRows(user, rows, shapes))
    return None if row_dims is None else rows._replace(dim=row_dims[0])


def _shapes_in(graph: fx.Graph, values: Sequence[Mapping[fx.Node, Any]]) -> Shapes:
    """Return the shapes of all dense tensors that have the same number of dimensions for all batch sizes."""
    found: Shapes = {}
    for node in graph.nodes:
        made = [one.get(node) for one in values]
        if all(isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided for tensor in made):
            shapes = tuple(tensor.shape for tensor in made)  # type: ignore[union-attr]
            if len({len(shape) for shape in shapes}) == 1:
                found[node] = shapes
    return found


def _rows_read(node: fx.Node, shapes: Shapes) -> Rows | None:
    """Return the rows that all users of a node read; None if they differ, or are most or none of the rows."""
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
    """Return the rows that a node reads of its first argument."""
    if not reads_rows(node) or node.kwargs:
        return None
    given: list[Any] = list(node.args[1:])
    if node.target is aten.select.int:
        given += [given[1] + 1 or _END] if type(given[1]) is int else [None]
    defaults = (0, 0, _END, 1)
    dim, start, end, step = (defaults[at] if value is None else value for at, value in zip_longest(range(4), given))
    is_known = all(type(number) is int for number in (dim, start, end, step))
    return Rows(dim % num_dims, start, end, step) if is_known else None


def _sources(info: _NodeRows) -> RowDims | None:
    """Return the dimension of the rows in each argument that has them; None if the node needs other rows too."""
    target, node = info.node.target, info.node
    if any(isinstance(value, fx.Node) for value in node.kwargs.values()):
        return None
    if not info.shapes.keys() >= set(node.all_input_nodes):  # numbers, nested graphs, other tensor types
        return None
    if target in _RULES:
        return _RULES[target](info)
    return _elementwise(info) if _is_elementwise(target) else None


def _is_elementwise(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags


def _move_up(graph: fx.Graph, node: fx.Node, rows: Rows, row_dims: RowDims) -> list[tuple[fx.Node, fx.Node]]:
    """Let a node compute only some rows; return the nodes that read them, with their replacements."""
    args = list(node.args)
    with graph.inserting_before(node):
        for at, dim in row_dims.items():
            of: Any = node.args[at]
            args[at] = graph.call_function(aten.slice.Tensor, (of, dim, *rows[1:]))
        if node.target is aten.scaled_dot_product_attention.default and len(args) > _CAUSAL:
            args[_CAUSAL] = False  # the last query sees all keys
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


def _elementwise(info: _NodeRows) -> RowDims | None:
    """Tensors are broadcast: the rows are in those that have this dimension."""
    places = [at for at, value in enumerate(info.node.args) if isinstance(value, fx.Node)]
    if len({info.node.args[at] for at in places}) < len(info.node.all_input_nodes):  # some arguments are in a list
        return None
    shapes = {at: info.shapes[info.given(at)] for at in places}
    for which, whole in enumerate(info.shapes[info.node]):
        if torch.broadcast_shapes(*(shape[which] for shape in shapes.values())) != whole:  # type: ignore[no-untyped-call]
            return None
    found: RowDims = {}
    for at in places:
        dim = info.rows.dim - (info.num_dims - info.num_dims_of(at))
        sizes = {shape[dim] for shape in shapes[at]} if dim >= 0 else {1}
        if sizes != {1}:
            found[at] = dim
    return found


def _same(info: _NodeRows) -> RowDims:
    return {0: info.rows.dim}


def _norm(info: _NodeRows) -> RowDims | None:
    return _same(info) if info.rows.dim < info.num_dims - len(info.given(1)) else None


def _linear(info: _NodeRows) -> RowDims | None:
    if info.given(2) is not None and info.num_dims_of(2) > 1:  # one bias per row
        return None
    return _same(info) if info.rows.dim < info.num_dims - 1 else None


def _product(info: _NodeRows) -> RowDims | None:
    """A row of a matrix product is a row of the first matrix times the second matrix."""
    left, right = info.num_dims_of(0), info.num_dims_of(1)
    if left < 2 or right < 2:
        return None
    if info.rows.dim == info.num_dims - 2:
        return {0: left - 2}
    return _same(info) if right == 2 and info.rows.dim < info.num_dims - 2 else None


def _along(info: _NodeRows) -> RowDims | None:
    """An operation along some dimensions treats the other dimensions independently."""
    dims = info.given(1)
    if info.node.target is not aten.softmax.int and info.given(2) is not True:
        return None
    along = {dim % info.num_dims for dim in ([dims] if isinstance(dims, int) else dims or range(info.num_dims))}
    return None if info.rows.dim in along else _same(info)


def _attention(info: _NodeRows) -> RowDims | None:
    """A query reads all keys and no other query; with a causal mask, only the last query reads all keys."""
    names = {"attn_mask": 3, "dropout_p": 4, "is_causal": _CAUSAL}
    given = {name: info.node.kwargs.get(name, info.given(at)) for name, at in names.items()}
    if info.rows.dim != info.num_dims - 2 or given["attn_mask"] is not None or given["dropout_p"]:
        return None
    if given["is_causal"]:
        queries, keys = ([shape[-2] for shape in info.shapes[info.given(at)]] for at in (0, 1))
        if info.rows[1:] != (-1, _END, 1) or queries != keys or "is_causal" in info.node.kwargs:
            return None
    return {0: info.num_dims_of(0) - 2}


def _transpose(info: _NodeRows) -> RowDims:
    first, second = (dim % info.num_dims for dim in (info.given(1), info.given(2)))
    return {0: {first: second, second: first}.get(info.rows.dim, info.rows.dim)}


def _permute(info: _NodeRows) -> RowDims:
    return {0: info.given(1)[info.rows.dim] % info.num_dims}


def _flatten(info: _NodeRows) -> RowDims | None:
    num_dims = info.num_dims_of(0)
    if num_dims == 0:
        return None
    first, last = (dim % num_dims for dim in (info.given(1, 0), info.given(2, -1)))
    if info.rows.dim == first and first != last:
        return None
    return {0: info.rows.dim if info.rows.dim <= first else info.rows.dim + last - first}


def _unsqueeze(info: _NodeRows) -> RowDims | None:
    new = info.given(1) % info.num_dims
    return None if info.rows.dim == new else {0: info.rows.dim - (info.rows.dim > new)}


def _slice(info: _NodeRows) -> RowDims | None:
    other = _rows_of(info.node, info.num_dims)
    return None if other is None or other.dim == info.rows.dim else _same(info)


def _select(info: _NodeRows) -> RowDims | None:
    other = _rows_of(info.node, info.num_dims + 1)
    return None if other is None else {0: info.rows.dim + (info.rows.dim >= other.dim)}


def _dropout(info: _NodeRows) -> RowDims | None:
    return _same(info) if info.given(2) is False else None


_CAUSAL = 5  # its position
_VIEWS: dict[object, Rule] = {
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.flatten.using_ints: _flatten,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.dropout.default: _dropout,
    aten.contiguous.default: _same,
}
_RULES: dict[object, Rule] = {
    **_VIEWS,
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
    aten.to.dtype: _same,
}
