"""Stage runner: runs one stage of an inference pipeline, on a GPU with its own streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.devices.cuda_streams import CudaStreams, Event, current_stream, new_stream
from penstock.model.example import arguments_of
from penstock.model.structure import flatten, rebuild

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class StageData:
    """The data that goes from stage to stage."""

    tensors: Sequence[torch.Tensor]
    template: object  # the structure around the tensors
    ready: Event | None = None  # on a GPU, the event after which the tensors are ready

    @classmethod
    def of(cls, thing: object, *, is_apart: bool) -> StageData:
        """Take an object apart; if no stage is on a GPU, keep it whole."""
        if not is_apart:
            return cls((), thing)
        tensors, template = flatten(thing)
        return cls([tensor.detach() for tensor in tensors], template)

    def open(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:  # noqa: ANN401 - the type of the original object
        """Put the object together, with other tensors if given."""
        return rebuild(self.template, self.tensors if tensors is None else tensors)


def arguments(thing: object) -> Arguments:
    """Return the arguments of a stage: a tuple or a dict becomes several arguments, anything else one."""
    if isinstance(thing, (torch.Tensor, Mapping, tuple)) and not hasattr(thing, "_fields"):
        return arguments_of(thing)
    return (thing,), {}


class StageRunner:
    """One stage: a Graph, or any function."""

    def __init__(self, run: Callable[..., Any], device: torch.device) -> None:
        self.run, self.device = run, device
        self.streams = CudaStreams(device) if device.type == "cuda" else None
        self.out = None if self.streams is None else new_stream(device)
        if self.streams is not None:  # the model may still be being copied to the GPU
            self.streams.compute.wait_stream(current_stream(device))

    def working(self) -> ExitStack:
        """Return the context in which the thread of this stage works."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if self.streams is not None:
            stack.enter_context(self.streams.running())
        return stack

    def __call__(self, given: StageData, *, is_last: bool, is_apart: bool) -> StageData:
        """Run the stage; on a GPU, the host does not wait.

        Returns:
            The arguments of the next stage (a tuple becomes several), or the result of the last stage.
        """
        args, kwargs = given.open(self._on_this_device(given))
        made = self.run(*args, **kwargs)
        if not is_last:
            made = (made, {}) if type(made) is tuple else ((made,), {})
        data = StageData.of(made, is_apart=is_apart)
        return data if self.streams is None else replace(data, ready=self.streams.mark())

    def _on_this_device(self, given: StageData) -> Sequence[torch.Tensor]:
        """Return the tensors on this device; later work of this thread waits for them."""
        if self.streams is None:
            if given.ready is not None:  # from a GPU to a CPU: the host must wait
                given.ready.synchronize()
            return [tensor.to(self.device) for tensor in given.tensors]
        if any(tensor.device != self.device for tensor in given.tensors):
            return self.streams.bring(given.tensors, given.ready)
        if given.ready is not None:
            self.streams.compute.wait_event(given.ready)
        return given.tensors
