"""Column sums: computes sums over rows as products with ones, if another product reads the rows anyway.

The gradient of a linear layer's bias is a sum over rows. The product that computes the gradient of the layer's weight
reads the same rows. For the sum, Inductor reads all rows again, with one kernel for partial sums and one that adds
these up. As a product, the sum is one kernel, which takes less time and less of the GPU (benchmarks/gpu).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.bmm.default})
_VIEWS = frozenset(
    {
        _aten.permute.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.view.default,
        _aten.reshape.default,
        _aten.unsqueeze.default,
        _aten.squeeze.dim,
        _aten.expand.default,
    }
)
_EXACT = torch.bfloat16  # products are exact in float32, which has the same range: no partial sum overflows


def sums_as_products(graph: fx.Graph, devices: Collection[str]) -> None:
    """Replace sums over rows that a product reads too by products, in a graph that Inductor is about to compile.

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
