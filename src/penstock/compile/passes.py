"""Own pass: the changes that Penstock makes to the graphs of stages before Inductor compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from penstock.compile import added_products, column_sums
from penstock.compile.column_sums import sums_as_products
from penstock.randomness import placed_draws as placed
from penstock.randomness.placed_draws import place_draws

_aten = torch.ops.aten
_FILES = (__file__, added_products.__file__, column_sums.__file__, placed.__file__)


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
