"""Placed draws: random operations of compiled code with the part of the model for which they draw.

Uncompiled code records the draw name (`penstock.randomness.draw_names`) before each random operation. Compiled code
cannot: torch fuses and reorders operations, and drops such records. So a pass over the graph replaces each random
operation by an operation of Penstock. It takes the number of the part, and the number of draws of the part before it.
The names for these numbers are passed with each call, so stages that look alike share their compiled code.

A program has several parts only if its own code calls `draw_at`, because the code is the key of torch's caches. Modules
that are compiled together do not call it, so if they draw, they are compiled one by one (`UnplacedDrawError`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.traceback import annotate

from penstock.errors import UsageError
from penstock.randomness.draw_names import enter, here, set_draw_names

_MARK = "penstock place"
_NAMESPACE = "penstock_placed"

Operation = torch._ops.OpOverload[..., Any]

ORIGINAL_OF: dict[Operation, Operation] = {}
_PLACED_OF: dict[Operation, Operation] = {}
_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def draw_at(place: int, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
    """Call an operation; its draws belong to the part of the program with this number."""
    if torch.compiler.is_compiling():
        with annotate({_MARK: place}):
            return operation(*args, **kwargs)
    names = here.places  # torch stopped compiling the program, because it had too many shapes
    enter(names[place])
    try:
        return operation(*args, **kwargs)
    finally:
        set_draw_names(names)


class UnplacedDrawError(Exception):
    """An error for modules that draw and are compiled together; it would be unknown which of them draws."""


def place_draws(graph: fx.Graph, *, may_draw: bool = True) -> None:
    """Replace the random operations of a graph by placed draws.

    Raises:
        UnplacedDrawError: if there are random operations and `may_draw` is False.
        UsageError: if the backward would draw again; it would draw other numbers, and gradients would be wrong.
    """
    is_backward = any(node.name.startswith("tangents_") for node in graph.find_nodes(op="placeholder"))
    turns: Counter[int] = Counter()
    for node in list(graph.nodes):
        if isinstance(node.target, HigherOrderOperator) and "rng_state" in str(node.target):
            raise UsageError(_DRAWN_AGAIN)
        placed = _PLACED_OF.get(node.target)
        if placed is None or not is_on(node.target, node.args, node.kwargs):
            continue
        if not may_draw:
            raise UnplacedDrawError
        if is_backward:
            raise UsageError(_DRAWN_AGAIN)
        place = node.meta.get("custom", {}).get(_MARK, 0)
        node.args, node.target = (place, turns[place], *node.args), placed
        turns[place] += 1


_DRAWN_AGAIN = (
    "compile: the backward would draw random numbers again, and they would differ from those of the forward "
    "(torch.utils.checkpoint around dropout, or activation_memory_budget), so gradients would be wrong. Turn "
    "checkpointing off in the model (transformers: gradient_checkpointing_disable()), and let the pipeline recompute "
    'whole stages: keep="recompute"'
)


@cache
def argument_names(operation: Operation) -> tuple[str, ...]:
    """Return the names of an operation's arguments, in order."""
    return tuple(argument.name for argument in operation._schema.arguments)


def is_on(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random operation draws with these arguments; None means training."""
    switches = _switches(operation)
    values = (args[place] if place < len(args) else kwargs.get(name, default) for name, place, default in switches)
    return all(value is None or bool(value) for value in values)


@cache
def _switches(operation: Operation) -> tuple[tuple[str, int, object], ...]:
    """Return the names, places and defaults of the arguments that switch the draws of an operation on or off."""
    known = ("dropout_p", "dropout", "train", "training")
    arguments = enumerate(operation._schema.arguments)
    return tuple(
        (argument.name, place, argument.default_value) for place, argument in arguments if argument.name in known
    )


def define() -> None:
    """Define the placed draws; compiled code that torch caches on disk finds them by their names."""
    if _PLACED_OF:
        return
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and not schema.is_mutable and not schema.name.endswith("_backward"):
            original = _overload(schema)
            if original is not None and torch.Tag.nondeterministic_seeded in original.tags:
                _define(original)


def _overload(schema: Any) -> Operation | None:  # noqa: ANN401 - untyped in torch
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
    return None if packet is None else getattr(packet, schema.overload_name or "default", None)


def _define(original: Operation) -> None:
    name = f"{original._schema.name.removeprefix('aten::')}_{original._overloadname}"
    _, _, arguments = str(original._schema).partition("(")
    comma = "" if arguments.startswith(")") else ", "
    signature = f"{name}(int place, int turn{comma}{arguments}"
    _library.define(signature, tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]

    def run(place: int, turn: int, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as given
        del place, turn  # read by penstock.randomness.draws; without it, the part does not matter
        return original(*args, **kwargs)

    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{_NAMESPACE}::{name}", run, lib=_library)
    placed = getattr(getattr(torch.ops, _NAMESPACE), name).default
    ORIGINAL_OF[placed], _PLACED_OF[original] = original, placed
