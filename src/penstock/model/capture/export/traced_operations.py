"""Traced operations: the properties of a node of a trace: its effects, in-place changes, shared memory and region."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Container, Iterable, Iterator
from typing import Any, cast

import torch
from torch import fx

Settings = tuple[Any, ...]
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
_LEADING: dict[Any, int] = {_AUTOCAST: 4, _GRAD: 1}  # the number of settings, the arguments before the graph
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
# these operations may return their argument itself, although their schema does not declare this
_MAY_ALIAS = (
    "reshape",
    "flatten",
    "contiguous",
    "to",
    "expand_as",
    "type_as",
    "dropout",
    "view_as",
    "unflatten",
    "movedim",
    "einsum",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "broadcast_tensors",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    "meshgrid",
    "conj_physical",
    "resolve_conj",
    "resolve_neg",
)


def is_tensor(node: fx.Node) -> bool:
    """Return whether the result of a node is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_part(node: fx.Node) -> bool:
    """Return whether a node only takes one output of another node."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not is_tensor(node.args[0])


def is_number(node: fx.Node) -> bool:
    """Return whether a node makes a number, such as a size."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def is_check(node: fx.Node) -> bool:
    """Return whether a node only checks an assumption that torch made."""
    return any(word in str(node.target) for word in _ASSERTIONS)


def has_effect(node: fx.Node) -> bool:
    """Return whether a node draws random numbers or changes a tensor; such a node must run exactly once, in order."""
    op = op_of(node)
    if isinstance(op, torch._ops.HigherOrderOperator):
        return any(
            has_effect(inner) for graph in inner_graphs(node) for inner in graph.nodes if inner.op == "call_function"
        )
    if not isinstance(op, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or op._schema.is_mutable or "batch_norm" in op._schema.name


def draws(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, or may draw them."""
    op = op_of(node)
    if isinstance(op, torch._ops.OpOverload):
        takes_generator = any(argument.name == "generator" for argument in op._schema.arguments)
        return takes_generator or torch.Tag.nondeterministic_seeded in op.tags
    return has_effect(node)


def inner_graphs(node: fx.Node) -> Iterator[fx.Graph]:
    """Yield the graphs among the arguments of a node, which it runs."""
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            inner = getattr(argument.graph.owning_module, str(argument.target), None)
            if isinstance(inner, fx.GraphModule):
                yield inner.graph


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node changes in place."""
    op = op_of(node)
    if isinstance(op, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes) if has_effect(node) else []
    if not isinstance(op, torch._ops.OpOverload):
        return []
    schema = op._schema
    if "batch_norm" in schema.name:
        return [argument for argument in args_of(node)[3:5] if isinstance(argument, fx.Node)]
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            args = args_of(node)
            given = args[position] if position < len(args) else node.kwargs.get(argument.name)
            written += [given] if isinstance(given, fx.Node) else [g for g in given or () if isinstance(g, fx.Node)]  # type: ignore[union-attr]
    return written


def aliased_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose memory a node's outputs may share."""
    op = op_of(node)
    if isinstance(op, torch._ops.HigherOrderOperator):
        return list(node.all_input_nodes)
    if not isinstance(op, torch._ops.OpOverload):
        return []
    is_declared = any(result.alias_info is not None for result in op._schema.returns)
    if not is_declared and op._schema.name.removeprefix("aten::") not in _MAY_ALIAS:
        return []
    return node.all_input_nodes[:1] if is_declared else node.all_input_nodes


class Families:
    """The families of fx nodes that share memory, and which of them are changed in place."""

    def __init__(self, calls: Iterable[fx.Node]) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        written = []
        for node in calls:
            for made in (node, *(user for user in node.users if is_part(user))):
                for other in aliased_by(node):
                    self._parent[self._find(made)] = self._find(other)
            written += written_by(node)
        for node in list(self._parent):
            self._members.setdefault(self._find(node), []).append(node)
        self._changed = {self._find(node) for node in written}

    def _find(self, node: fx.Node) -> fx.Node:
        self._parent.setdefault(node, node)
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def of(self, node: fx.Node) -> list[fx.Node]:
        """Return all nodes that share memory with a node, including itself."""
        return self._members.get(self._find(node), [node])

    def is_changed(self, *nodes: fx.Node) -> bool:
        """Return whether any node changes the memory of one of these nodes in place."""
        return any(self._find(node) in self._changed for node in nodes)


def op_name(node: fx.Node) -> str:
    """Return the name of a node's operation."""
    op = op_of(node)
    if isinstance(op, torch._ops.OpOverload):
        return str(op._schema.name).removeprefix("aten::")
    return getattr(op, "__name__", str(op))


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that contains a node; empty if unknown."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [entry[0] for entry in stack.values()]
    return paths[-1].removeprefix("model").removeprefix(".") if paths else ""


def signature_of(node: fx.Node, *, held: Container[fx.Node]) -> str:
    """Return a text that is equal for nodes that do the same work on inputs of the same shapes.

    `held` contains the nodes of parameters and buffers.
    """

    def text(argument: object) -> str:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                return f"{'held ' if argument in held else ''}{value.dtype}{[str(size) for size in value.shape]}"
            return "graph" if argument.op == "get_attr" else str(value)
        if isinstance(argument, (list, tuple)):
            return f"[{', '.join(text(item) for item in argument)}]"
        return repr(argument)

    inner = " ".join(str(n.target) for graph in inner_graphs(node) for n in graph.nodes if n.op == "call_function")
    arguments = [text(argument) for argument in node.args] + [f"{k}={text(v)}" for k, v in node.kwargs.items()]
    return f"{op_of(node)}({', '.join(arguments)}){inner}"


# ---- regions of autocast and of no_grad: replaced by their operations, so that cuts can lie inside them


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
