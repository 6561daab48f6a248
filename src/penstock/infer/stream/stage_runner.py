"""Line: one stage of an inference pipeline: what it runs, and on a GPU the streams for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.devices.cuda_streams import CudaStreams, Event, current_stream, new_stream
from penstock.model.example import arguments_of
from penstock.model.structure import flatten, rebuild

__all__ = ["Arguments", "Line", "Parcel", "arguments"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Parcel:
    """What goes from stage to stage.

    Attributes:
        tensors: all tensors in it.
        template: what stood around them.
        ready: on a GPU, behind what makes them.
    """

    tensors: Sequence[torch.Tensor]
    template: object
    ready: Event | None = None

    @classmethod
    def of(cls, thing: object, *, is_apart: bool) -> Parcel:
        """Take a thing apart, or where no stage is on a GPU leave it as it is."""
        if not is_apart:
            return cls((), thing)
        tensors, template = flatten(thing)
        return cls([tensor.detach() for tensor in tensors], template)

    def open(self, tensors: Sequence[torch.Tensor] | None = None) -> Any:  # noqa: ANN401 - whatever it was made of
        """Return the thing, with other tensors if given."""
        return rebuild(self.template, self.tensors if tensors is None else tensors)


def arguments(thing: object) -> Arguments:
    """Return what to call a stage with: a tuple or a dict becomes several arguments, all else is one."""
    if isinstance(thing, (torch.Tensor, Mapping, tuple)) and not hasattr(thing, "_fields"):
        return arguments_of(thing)
    return (thing,), {}


class Line:
    """One stage.

    Args:
        run: the stage: a Graph, or any function.
        device: where it runs.
    """

    def __init__(self, run: Callable[..., Any], device: torch.device) -> None:
        self.run, self.device = run, device
        self.streams = CudaStreams(device) if device.type == "cuda" else None
        self.out = None if self.streams is None else new_stream(device)
        if self.streams is not None:  # the model may still be on its way to the GPU
            self.streams.compute.wait_stream(current_stream(device))

    def working(self) -> ExitStack:
        """Return what the thread of this stage works within."""
        around = ExitStack()
        around.enter_context(torch.no_grad())
        if self.streams is not None:
            around.enter_context(self.streams.running())
        return around

    def __call__(self, given: Parcel, *, is_last: bool, is_apart: bool) -> Parcel:
        """Run the stage on a parcel of arguments. The host waits for nothing.

        Returns:
            A parcel of the next stage's arguments: a tuple becomes several. Of the last stage, of what it returns.
        """
        args, kwargs = given.open(self._brought(given))
        made = self.run(*args, **kwargs)
        if not is_last:
            made = (made, {}) if type(made) is tuple else ((made,), {})
        parcel = Parcel.of(made, is_apart=is_apart)
        return parcel if self.streams is None else replace(parcel, ready=self.streams.mark())

    def _brought(self, given: Parcel) -> Sequence[torch.Tensor]:
        """Return the tensors of a parcel on this device; what this thread does from now on waits for them."""
        if self.streams is None:
            if given.ready is not None:  # from a GPU to a CPU: here the host has to wait
                given.ready.synchronize()
            return [tensor.to(self.device) for tensor in given.tensors]
        if any(tensor.device != self.device for tensor in given.tensors):
            return self.streams.bring(given.tensors, given.ready)
        if given.ready is not None:
            self.streams.compute.wait_event(given.ready)
        return given.tensors
