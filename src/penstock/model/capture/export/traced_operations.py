"""Traced operations: the properties of a node of a trace: its effects, its in-place changes, and shared memory."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator

import torch
from torch import fx

from penstock.model.capture.export.traced_regions import args_of, op_of

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

    Args:
        node: the node of an operation.
        held: the nodes of parameters and buffers.
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
