"""Replayed visits: run the model's own forward and pass each unit to a visitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from penstock.errors import CaptureError
from penstock.model.capture.replay.forward_walk import Args, Function, Kwargs, ModuleCall, Walk, tensors_in
from penstock.model.capture.replay.module_shell import make_shell
from penstock.model.capture.replay.torch_functions import is_data_shaped, is_query, reads_data
from penstock.model.example import Call
from penstock.model.graph import Graph
from penstock.model.parameters import held_tensors, stand_in
from penstock.model.structure import flatten, rebuild
from penstock.model.visit import RunNode, Visitor


def visit_replay(model: nn.Module, graph: Graph, call: Call, visitor: Visitor, *, device: torch.device) -> None:
    """Run the model's forward on a device and pass each unit to a visitor.

    Raises:
        CaptureError: on the meta device, if the forward reads data.
    """
    shell = make_shell(model)
    if any(tensor.device != device for tensor in held_tensors(shell).values()):
        move_shell(shell, device)
    index_of = {(node.module, _ordinal(node.name)): index for index, node in enumerate(graph.nodes)}
    walk = _VisitWalk(shell, graph, visitor, index_of)
    args, kwargs = call.map(lambda tensor: tensor.detach().to(device)).arguments()
    try:
        with (
            torch.no_grad(),
            device if device.type == "meta" else nullcontext(),
            walk.watching(dict(shell.named_modules())),
        ):
            shell(*args, **kwargs)
    except RuntimeError as error:
        if device.type == "meta":
            raise CaptureError(
                f"the model reads data, so it cannot run on the meta device: {error}; measure it on a real device"
            ) from error
        raise


def _plain(template: object) -> str:
    """Return the plain arguments of a function as text for its signature; empty if they contain addresses."""
    return repr(template)[:500] if "object at 0x" not in repr(template) else ""


def _ordinal(name: str) -> int:
    _, _, ordinal = name.rpartition("#")
    return int(ordinal) if ordinal.isdigit() and "#" in name else 0


def move_shell(shell: nn.Module, device: torch.device) -> nn.Module:
    """Replace the tensors of a shell by copies on a device; shared tensors are not changed, tied ones stay tied."""
    moved: dict[int, torch.Tensor] = {}
    for module in shell.modules():
        for place in (module._parameters, module._buffers):
            for key, tensor in place.items():
                if tensor is not None:
                    if id(tensor) not in moved:
                        new = stand_in(tensor.detach(), device)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        moved[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    place[key] = moved[id(tensor)]  # type: ignore[assignment]
    return shell


def run_with(
    visitor: Visitor, index: int, module: nn.Module, args: Args, kwargs: Kwargs,
    *, names: Sequence[str], held: Mapping[str, torch.Tensor],
) -> Any:  # noqa: ANN401  # fmt: skip
    """Pass the call of a module to a visitor, and return its result."""
    inputs, template = flatten((args, dict(kwargs)))
    results: list[object] = []
    local = held_tensors(module)
    first_of: dict[int, str] = {}
    for name, tensor in held.items():
        first_of.setdefault(id(tensor), name)

    def run(given: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        by_name = dict(zip(names, parameters, strict=True))
        own = {name: by_name.get(first_of[id(tensor)], tensor) for name, tensor in local.items()}
        new_args, new_kwargs = rebuild(template, list(given))
        made, shape = flatten(functional_call(module, own, new_args, new_kwargs, tie_weights=False))
        results.append(shape)
        return made

    made = visitor(index, run, inputs, [held[name] for name in names])
    return rebuild(results[-1], made)


class _VisitWalk(Walk):
    """The walk that passes calls of units, and torch functions between them, to a visitor."""

    def __init__(self, shell: nn.Module, graph: Graph, visitor: Visitor, index_of: Mapping[ModuleCall, int]) -> None:
        super().__init__()
        self.modules = dict(shell.named_modules())
        self.held = held_tensors(shell)
        self.graph, self.visitor, self.index_of = graph, visitor, index_of
        self.is_in_unit, self.now = False, 0

    def on_function(self, function: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        name = getattr(function, "__name__", "")
        is_in_place = name.startswith("__") or (name.endswith("_") and not name.endswith("__"))
        inputs = list(tensors_in((args, kwargs)))
        is_mapped = any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in inputs)  # by vmap
        if (
            not inputs
            or is_mapped
            or is_in_place
            or is_query(function)
            or reads_data(function)
            or is_data_shaped(function, args)
        ):
            return function(*args, **kwargs)
        tensors, template = flatten((args, kwargs))
        shapes: list[object] = []

        def run(given: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            new_args, new_kwargs = rebuild(template, list(given))
            result = function(*new_args, **new_kwargs)
            made, shape = flatten(result)
            shapes.append(shape)
            return made

        with self.switched(on=False):
            made = self.visitor(self.now, run, tensors, [], f"{name}{_plain(template)}")
        return rebuild(shapes[-1], made)

    def on_call(self, path: str, ordinal: int, call: Function, args: Args, kwargs: Kwargs) -> Any:  # noqa: ANN401
        index = self.index_of.get((path, ordinal))
        if self.is_in_unit:
            return call(*args, **kwargs)
        if index is None:
            return self.inside(path, ordinal, call, args, kwargs)
        self.is_in_unit, self.now = True, index
        before, counted = dict(self.ordinals), self.ordinals
        before[path] = ordinal

        def visitor(
            index: int, run: RunNode, inputs: list[torch.Tensor], parameters: list[torch.Tensor], glue: str = ""
        ) -> list[torch.Tensor]:
            """Let the visitor run the call any number of times; the call and those inside it count once."""

            def run_once(given: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                nonlocal counted
                self.ordinals = dict(before)
                made = run(given, held)
                counted = dict(self.ordinals)
                return made

            return self.visitor(index, run_once, inputs, parameters, glue)

        try:
            names = self.graph.nodes[index].parameters
            return run_with(visitor, index, self.modules[path], args, kwargs, names=names, held=self.held)
        finally:
            self.is_in_unit, self.ordinals = False, counted
