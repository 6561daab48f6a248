"""Replay: a program as one CUDA graph for inputs of one shape, which have memory of their own, as the outputs have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.devices.cuda_streams import OnStream, Stream, current_stream
from penstock.devices.graph_capture import Maker, no_collection
from penstock.devices.kinds import kind_of
from penstock.infer.graph.interpreter import Interpreter

__all__ = ["Replay"]

_WARM_RUNS = 3  # what libraries do at their first calls (choose kernels, take memory) may not be part of a capture


class Replay:
    """The graph of one shape.

    All graphs of a model share one pool of memory, so they never run at the same time. What a graph returns stays as it
    is until one of them runs again.

    Args:
        interpreter: runs the program.
        held: the parameters, buffers and constants that it uses. The graph reads them where they are now, so it keeps
            hold of their memory; what is written there later it sees.
        places: where in memory all that the model holds is.
        changed: those of them that the program changes in place.
        values: the inputs of a call, of any device.
        batch_size: the samples in them.
        device: where it runs.
        maker: makes the graph.
        streams: one for each branch; None on a CPU.
    """

    def __init__(
        self, interpreter: Interpreter, *, held: Sequence[torch.Tensor], places: list[int],
        changed: Sequence[torch.Tensor], values: Sequence[torch.Tensor], batch_size: int, device: torch.device,
        maker: Maker, streams: Sequence[Stream] | None,
    ) -> None:  # fmt: skip
        self._interpreter, self._streams, self._device = interpreter, streams, device
        self._slots = [torch.empty_like(value, device=device, requires_grad=False) for value in values]
        self._held = [tensor.detach() for tensor in held]
        self.places = places
        self._load(values)
        arguments = [*self._held, *self._slots, batch_size]
        with self._aside():
            with self._unchanged(changed):
                self._once = interpreter.make_once(arguments)
                for _ in range(_WARM_RUNS):
                    interpreter.run(arguments, self._once, streams)
            with no_collection(), maker.capturing(()) as replay:
                self.outputs: tuple[torch.Tensor, ...] = interpreter.run(arguments, self._once, streams)
        self._replay = replay

    def __call__(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Run the program on the current stream; return its outputs, which the next run overwrites."""
        self._load(values)
        self._replay()
        return self.outputs

    def _load(self, values: Sequence[torch.Tensor]) -> None:
        """Copy what is given to where the graph reads it; without gradients, as the caller is."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.copy_(value, non_blocking=True)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Work on the first stream of the graph: behind what the caller's has been given, and before what follows."""
        if self._streams is None:
            yield
            return
        now, first = current_stream(self._device), self._streams[0]
        first.wait_stream(now)
        try:
            with OnStream(first):
                yield
        finally:
            now.wait_stream(first)

    @contextmanager
    def _unchanged(self, changed: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put back what runs change that only warm up: buffers, and how far random numbers have been drawn."""
        before = [tensor.clone() for tensor in changed]
        drawn = kind_of(self._device).random_state(self._device)
        try:
            yield
        finally:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
            kind_of(self._device).set_random_state(self._device, drawn)
