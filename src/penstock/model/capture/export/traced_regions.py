"""Traced regions: replace autocast and no-grad regions by their operations, so that cuts can lie inside them."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

Settings = tuple[Any, ...]
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_LEADING: dict[Any, int] = {_AUTOCAST: 4, _GRAD: 1}  # the number of settings, the arguments before the graph


def run_within(settings: tuple[Settings, ...], op: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Call an operation under the settings of its regions: autocast, or without gradients."""
    with contextlib.ExitStack() as stack:
        for setting in settings:
            if len(setting) == 1:
                stack.enter_context(torch.set_grad_enabled(setting[0]))
            else:
                device, dtype, is_enabled, is_cached = setting
                stack.enter_context(torch.autocast(device, dtype, is_enabled, is_cached))
        return op(*args, **kwargs)


def op_of(node: fx.Node) -> Any:  # noqa: ANN401
    """Return the operation of a node; if the node was in a region, the operation inside `run_within`."""
    return node.args[1] if node.target is run_within else node.target


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a node's operation, without those of `run_within`."""
    return node.args[2:] if node.target is run_within else node.args


def stops_gradients(node: fx.Node) -> bool:
    """Return whether no gradient flows back through a node."""
    if node.target is run_within:
        return any(setting == (False,) for setting in node.args[0]) or op_of(node) is torch.ops.aten.detach.default  # type: ignore[union-attr]
    is_off = node.target is _GRAD and node.args[0] is False
    return is_off or node.target is torch.ops.aten.detach.default


def open_regions(root: fx.GraphModule) -> None:
    """Replace each region by its operations, each called under the settings of the region."""
    for node in list(root.graph.nodes):
        if node.op == "call_function" and node.target in _LEADING:
            _open(root, node, ())
    root.graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr")


def _open(owner: fx.GraphModule, node: fx.Node, around: tuple[Settings, ...]) -> None:
    """Put the operations of a region before the node that called it, and pass their results to its users."""
    results = list(_inline(owner, node, around, target=owner.graph, before=node, known={}))
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[cast(int, user.args[1])])
            owner.graph.erase_node(user)
    if node.users:  # the region returns a single value, not a tuple
        node.replace_all_uses_with(results[0])
    owner.graph.erase_node(node)


def _inline(
    owner: fx.GraphModule, node: fx.Node, around: tuple[Settings, ...],
    *, target: fx.Graph, before: fx.Node, known: dict[fx.Node, Any],
) -> Iterator[Any]:  # fmt: skip
    count = _LEADING[node.target]
    settings = (*around, tuple(node.args[:count]))
    inner: fx.GraphModule = getattr(owner, str(node.args[count].target))  # type: ignore[union-attr]
    given = fx.node.map_arg(node.args[count + 1 :], lambda a: known.get(a, a))
    own: dict[fx.Node, Any] = {}
    placeholders = (n for n in inner.graph.nodes if n.op == "placeholder")
    own.update(zip(placeholders, given, strict=False))
    for step in inner.graph.nodes:
        if step.op in {"placeholder", "get_attr"}:
            continue
        if step.op == "output":
            results = step.args[0] if isinstance(step.args[0], (list, tuple)) else (step.args[0],)
            yield from (own.get(result, result) for result in results)
            return
        if step.target in _LEADING:
            own[step] = list(_inline(inner, step, settings, target=target, before=before, known=own))
            continue
        if step.target is operator.getitem and isinstance(own.get(step.args[0]), list):
            own[step] = own[step.args[0]][step.args[1]]
            continue
        with target.inserting_before(before):
            args = fx.node.map_arg(step.args, lambda a: own[a])
            kwargs = fx.node.map_arg(step.kwargs, lambda a: own[a])
            if isinstance(step.target, torch._ops.OpOverload):
                made = target.call_function(run_within, (settings, step.target, *args), kwargs)
            else:
                made = target.call_function(step.target, args, kwargs)
        made.meta.update(step.meta)
        if not made.meta.get("nn_module_stack"):
            made.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        own[step] = made
