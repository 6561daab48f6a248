"""Trial: one node taken out of its model, to be run and differentiated as often as one likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.model.graph import Node
from penstock.model.structure import flatten, rebuild
from penstock.model.visit import RunNode

__all__ = ["Backward", "Trial"]


@dataclass(frozen=True)
class Backward:
    """A forward that has run and can be differentiated again and again.

    Attributes:
        outputs: those that a gradient flows back through.
        grads: one for each.
    """

    outputs: list[torch.Tensor]
    grads: list[torch.Tensor]

    def gradient(self, of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the gradient of some inputs or parameters; the graph stays for the next call."""
        wanted = [*of, *_needed_too(self.outputs)]
        found = torch.autograd.grad(self.outputs, wanted, self.grads, retain_graph=True, allow_unused=True)
        return found[: len(of)]


def _needed_too(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what must be asked for, too: torch's group norm of channels-last values crashes for its weights alone."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    leaves = [node.next_functions[0][0] for node in nodes if node.name().startswith("NativeGroupNormBackward")]
    return [leaf.variable for leaf in leaves if leaf is not None and hasattr(leaf, "variable")]


class Trial:
    """One node with its inputs and parameters as leaves: what is computed from them touches nothing of the model.

    Args:
        node: which one.
        run: computes it.
        inputs: its input tensors; those that require a gradient get one.
        parameters: its parameters and buffers, likewise. What the node changes in place must be a copy.
        writes_inputs: it changes its inputs, so that each run needs fresh ones.
    """

    def __init__(
        self,
        node: Node,
        run: RunNode,
        *,
        inputs: list[torch.Tensor],
        parameters: list[torch.Tensor],
        writes_inputs: bool,
    ) -> None:
        self.node, self.inputs, self.parameters, self.writes_inputs = node, inputs, parameters, writes_inputs
        self._run = run
        self.wanted_inputs = [tensor for tensor in inputs if tensor.requires_grad]
        self.wanted_parameters = [tensor for tensor in parameters if tensor.requires_grad]

    def given(self) -> list[torch.Tensor]:
        """Return the tensors to run with: the leaves, or copies of them that may be changed."""
        if not self.writes_inputs:
            return self.inputs
        with torch.enable_grad():  # also where the visit itself keeps no history
            return [tensor.clone() for tensor in self.inputs]

    def forward(self, given: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run the node and return its outputs, with the graph that leads back to the leaves."""
        with torch.enable_grad():
            return self._run(self.given() if given is None else given, self.parameters)

    def backward(self, outputs: list[torch.Tensor] | None = None) -> Backward | None:
        """Return what differentiates the node, after a run of it; None where no gradient flows."""
        made = self.forward() if outputs is None else outputs
        wanted = [tensor for tensor in made if tensor.requires_grad]
        if not wanted or not (self.wanted_inputs or self.wanted_parameters):
            return None
        return Backward(wanted, [torch.ones_like(tensor) for tensor in wanted])

    def call(self) -> Callable[[], object]:
        """Return what runs the node as a stage would: the operation alone, without looking up its arguments.

        A node that writes its inputs may be called once; ask for another call then.
        """
        given = self.given()
        if self._operation is None:
            return partial(self._run, given, self.parameters)
        return self._operation.bind([*given, *self.parameters])

    @cached_property
    def _operation(self) -> _Operation | None:
        """The one operation that the node is; None where it is more than one, or works on more than it was given."""
        given = self.given()
        with torch.enable_grad(), _Watch() as watch:
            self._run(given, self.parameters)
        if len(watch.calls) != 1 or not isinstance(watch.calls[0][0], torch._ops.OpOverload):
            return None
        function, args, kwargs = watch.calls[0]
        tensors, template = flatten((args, kwargs))
        place_of = {id(tensor): place for place, tensor in enumerate([*given, *self.parameters])}
        if any(id(tensor) not in place_of for tensor in tensors):
            return None
        return _Operation(function, template, tuple(place_of[id(tensor)] for tensor in tensors))


@dataclass(frozen=True)
class _Operation:
    """An operation, its arguments with slots for tensors, and which of a node's tensors go into them."""

    function: Callable[..., object]
    template: object
    places: tuple[int, ...]

    def bind(self, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """Return the call of the operation on a node's tensors."""
        args, kwargs = rebuild(self.template, [tensors[place] for place in self.places])
        return partial(self.function, *args, **kwargs)


class _Watch(TorchFunctionMode):
    """Notes each call of an operation, not those that it makes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
