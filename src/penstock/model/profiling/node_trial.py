"""Trial: one node taken out of its model, to run and differentiate it repeatedly."""

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


@dataclass(frozen=True)
class Backward:
    """A forward that has run and can be differentiated repeatedly."""

    outputs: list[torch.Tensor]  # the outputs through which gradients flow back
    grads: list[torch.Tensor]  # one gradient per output

    def gradient(self, of: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of some inputs or parameters; the graph is kept for the next call."""
        wanted = [*of, *_inputs_against_crash(self.outputs)]
        found = torch.autograd.grad(self.outputs, wanted, self.grads, retain_graph=True, allow_unused=True)
        return found[: len(of)]


def _inputs_against_crash(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return inputs whose gradients must be computed too.

    torch's group norm of channels-last tensors crashes if only the gradients of its weights are computed.
    """
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    leaves = [node.next_functions[0][0] for node in nodes if node.name().startswith("NativeGroupNormBackward")]
    return [leaf.variable for leaf in leaves if leaf is not None and hasattr(leaf, "variable")]


class Trial:
    """One node with its inputs and parameters as leaves, so that a run does not affect the model.

    Args:
        node: the node.
        run: the function that computes it.
        inputs: its input tensors; those that require a gradient get one.
        parameters: its parameters and buffers, likewise; those that the node changes in place must be copies.
        writes_inputs: whether the node changes its inputs, so that each run needs new copies.
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
        """Return the inputs for one run: the leaves, or copies if the node changes its inputs."""
        if not self.writes_inputs:
            return self.inputs
        with torch.enable_grad():  # the visit itself may run without gradients
            return [tensor.clone() for tensor in self.inputs]

    def forward(self, given: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Run the node; return its outputs with the graph back to the leaves."""
        with torch.enable_grad():
            return self._run(self.given() if given is None else given, self.parameters)

    def backward(self, outputs: list[torch.Tensor] | None = None) -> Backward | None:
        """Return the backward of a run of the node; None if no gradient flows."""
        made = self.forward() if outputs is None else outputs
        wanted = [tensor for tensor in made if tensor.requires_grad]
        if not wanted or not (self.wanted_inputs or self.wanted_parameters):
            return None
        return Backward(wanted, [torch.ones_like(tensor) for tensor in wanted])

    def call(self) -> Callable[[], object]:
        """Return a call that runs the node as a stage would: only the operation, without looking up its arguments.

        If the node writes its inputs, the result can be called only once.
        """
        given = self.given()
        if self._operation is None:
            return partial(self._run, given, self.parameters)
        return self._operation.bind([*given, *self.parameters])

    @cached_property
    def _operation(self) -> _Operation | None:
        """The only operation of the node; None if it has several, or uses tensors that it was not given."""
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
    """An operation, its arguments as a template, and the index of the node's tensor for each slot."""

    function: Callable[..., object]
    template: object
    places: tuple[int, ...]

    def bind(self, tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
        """Return a call of the operation on the tensors of a node."""
        args, kwargs = rebuild(self.template, [tensors[place] for place in self.places])
        return partial(self.function, *args, **kwargs)


class _Watch(TorchFunctionMode):
    """A mode that records the calls of torch functions, without the calls within them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_function__(
        self, func: Callable[..., object], _: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
