"""Own pass: the changes that Penstock makes to the graphs of stages before Inductor compiles them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from penstock.compile import added_products
from penstock.randomness import placed_draws as placed
from penstock.randomness.placed_draws import place_draws

_aten = torch.ops.aten
_FILES = (__file__, added_products.__file__, placed.__file__)
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default}
_VIEWS = {
    _aten.permute.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.view.default,
    _aten.reshape.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.expand.default,
}
_EXACT = torch.bfloat16  # products are exact in float32, which has the same range: no partial sum overflows


class OwnPass(CustomGraphPass):
    """The pass: it places random operations, turns sums over rows into products, and lets products add to gradients.

    Args:
        look: a text that differs for programs whose parts have other numbers; their graphs can be equal.
        may_draw: whether the graph may contain random operations; if not, such a graph is refused.
        behind: a pass of the user, which runs after this one.
        devices: the types of devices where sums become products, and where products add to gradients.
    """

    def __init__(
        self,
        look: str = "",
        *,
        may_draw: bool = True,
        behind: Callable[[fx.Graph], object] | None = None,
        devices: tuple[str, ...] = ("cuda",),
    ) -> None:
        self._look, self._may_draw, self._behind, self._devices = look, may_draw, behind, devices
        placed.define()

    def __eq__(self, other: object) -> bool:
        """Return whether another pass does the same; code that was compiled with it can then be reused."""
        return type(other) is type(self) and other._facts == self._facts

    def __hash__(self) -> int:
        return hash(self._facts)

    @property
    def _facts(self) -> tuple[Any, ...]:
        return self._look, self._may_draw, self._behind, self._devices

    def uuid(self) -> Any:  # noqa: ANN401 - as in torch
        """Return the key of this pass in torch's cache of compiled code; None if its code must not be cached."""
        own = get_hash_for_files(_FILES, repr((self._look, self._may_draw, self._devices)))
        if self._behind is None:
            return own
        theirs = self._behind.uuid() if isinstance(self._behind, CustomGraphPass) else None
        return None if theirs is None else (own, theirs)

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place."""
        place_draws(graph, may_draw=self._may_draw)
        sums_as_products(graph, self._devices)
        products_that_add(graph, self._devices)
        if self._behind is not None:
            self._behind(graph)


def products_that_add(graph: fx.Graph, devices: tuple[str, ...]) -> None:
    """Replace products that are weight gradients by products that can add to existing gradients.

    This applies only to the graph of a backward. Its results are the gradients of the forward's inputs, in order. The
    inputs that the forward saved have the same names as in the forward's graph.
    """
    given = {node.name: node for node in graph.find_nodes(op="placeholder")}
    if not any(name.startswith("tangents_") for name in given) or _has_tokens():
        return
    (output,) = graph.find_nodes(op="output")
    results = list(output.args[0])
    for at, made in enumerate(results):
        weight = given.get(f"primals_{at + 1}")
        if weight is None or not isinstance(made, fx.Node) or results.count(made) > 1:
            continue
        if (rows := _rows_of(made, weight, devices)) is None:
            continue
        with graph.inserting_before(made):
            added = graph.call_function(added_products.OPERATION, (rows, made.args[1], weight))
        added.meta["val"] = made.meta["val"]
        made.replace_all_uses_with(added)
        graph.erase_node(made)


def _rows_of(made: fx.Node, weight: fx.Node, devices: tuple[str, ...]) -> fx.Node | None:
    """Return the gradient of a weight's output if a product of it is the weight's gradient, and nothing else."""
    if made.target is not _aten.mm.default or len(made.users) > 1:
        return None
    turned: Any = made.args[0]
    if turned.target is not _aten.permute.default:
        return None
    rows: fx.Node = turned.args[0]
    nodes: tuple[Any, ...] = (made, weight, rows, made.args[1])
    values = [value for node in nodes if isinstance(value := node.meta.get("val"), torch.Tensor)]
    if len(values) < len(nodes) or not all(value.is_contiguous() for value in values):
        return None
    gradient, own = values[:2]
    if (gradient.shape, gradient.dtype) != (own.shape, own.dtype) or gradient.device.type not in devices:
        return None
    # names are not reliable, so check that the same rows are multiplied only with this weight for the input gradient
    factors = {_base(user.args[1]) for user in rows.users if user.target is _aten.mm.default and user.args[0] is rows}
    return rows if factors == {weight} else None


def _has_tokens() -> bool:
    """Return whether the forward has tokens, which order its operations: inputs with a name, but without a gradient."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return bool(getattr(metadata, "tokens", None))


def _base(node: Any) -> fx.Node:  # noqa: ANN401 - a node
    while node.target is _aten.permute.default:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def sums_as_products(graph: fx.Graph, devices: Collection[str]) -> None:
    """Replace sums over rows that a product reads too by products, in a graph that Inductor is about to compile.

    The gradient of a linear layer's bias is a sum over rows. The product that computes the gradient of the layer's
    weight reads the same rows. For the sum, Inductor reads all rows again, with one kernel for partial sums and one
    that adds these up. As a product, the sum is one kernel, which takes less time and less of the GPU (benchmarks/gpu).

    Args:
        graph: the graph; it is changed in place.
        devices: the types of devices where sums are replaced; on a CPU there is no gain.
    """
    ones: dict[tuple[Any, ...], fx.Node] = {}  # shared by all sums over the same number of rows
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        if _is_of_rows(node, devices):
            made = _product(graph, node, ones)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _is_of_rows(node: fx.Node, devices: Collection[str]) -> bool:
    """Return whether a sum is over the rows of a contiguous matrix that a product reads too."""
    rows: Any = node.args[0]
    given, made = rows.meta.get("val"), node.meta.get("val")
    return (
        isinstance(given, torch.Tensor)
        and isinstance(made, torch.Tensor)
        and given.device.type in devices
        and given.dtype == made.dtype == _EXACT
        and given.dim() == 2
        and node.args[1] in ([0], [-2])
        and all(type(size) is int and size > 0 for size in given.shape)
        and given.is_contiguous()
        and _is_multiplied(rows)
    )


def _product(graph: fx.Graph, node: fx.Node, ones: dict[tuple[Any, ...], fx.Node]) -> fx.Node:
    """Add a product that computes the same as a sum over rows, and return it."""
    rows: Any = node.args[0]
    given, wanted = rows.meta["val"], node.meta["val"]
    key = (given.shape[0], given.dtype, given.device)
    if key not in ones:
        first = next(other for other in graph.nodes if other.op != "placeholder")
        kind = {"dtype": given.dtype, "device": given.device, "pin_memory": False}
        with graph.inserting_before(first), given.fake_mode:
            ones[key] = graph.call_function(_aten.full.default, ([1, given.shape[0]], 1.0), kind)
            ones[key].meta["val"] = torch.empty([1, given.shape[0]], dtype=given.dtype, device=given.device)
    with graph.inserting_before(node), given.fake_mode:
        made = graph.call_function(_aten.mm.default, (ones[key], rows))
        made.meta["val"] = torch.empty([1, given.shape[1]], dtype=given.dtype, device=given.device)
        if wanted.dim() == 2:
            return made
        flat = graph.call_function(_aten.reshape.default, (made, [given.shape[1]]))
        flat.meta["val"] = torch.empty([given.shape[1]], dtype=given.dtype, device=given.device)
        return flat


def _is_multiplied(node: fx.Node) -> bool:
    """Return whether a product reads a value, or a view of it; the value is then in memory anyway."""
    while node.target in _VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    waiting, seen = list(node.users), set()
    while waiting:
        user = waiting.pop()
        if user.target in _PRODUCTS:
            return True
        if user.target in _VIEWS and user not in seen:
            seen.add(user)
            waiting += user.users
    return False
