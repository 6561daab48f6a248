"""Graph replay: a program as one CUDA graph for inputs of one shape, with its own memory for inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from penstock.devices.cuda_streams import OnStream, Stream, current_stream
from penstock.devices.graph_capture import CudaGraphs, no_collection
from penstock.devices.kinds import kind_of
from penstock.infer.graph.interpreter import Interpreter

_WARM_RUNS = 3  # first calls choose kernels and allocate, which must not happen in a capture


class Replay:
    """The CUDA graph of one shape.

    All graphs of a model share one memory pool, so they never run at the same time. Outputs are valid until one of the
    graphs runs again.

    Args:
        interpreter: runs the program.
        held: the parameters, buffers and constants of the program. The graph reads them at their current addresses, so
            it keeps their memory alive; it sees later changes in place.
        places: the addresses of all tensors of the model.
        changed: the tensors in `held` that the program changes in place.
        values: the inputs of a call, on any device.
        batch_size: the number of samples in the inputs.
        device: the device.
        maker: captures the graph.
        streams: one per branch; None on a CPU.
    """

    def __init__(
        self, interpreter: Interpreter, *, held: Sequence[torch.Tensor], places: list[int],
        changed: Sequence[torch.Tensor], values: Sequence[torch.Tensor], batch_size: int, device: torch.device,
        maker: CudaGraphs, streams: Sequence[Stream] | None,
    ) -> None:  # fmt: skip
        self._interpreter, self._streams, self._device = interpreter, streams, device
        self._slots = [torch.empty_like(value, device=device, requires_grad=False) for value in values]
        self._held = [tensor.detach() for tensor in held]
        self.places = places
        self._load(values)
        arguments = [*self._held, *self._slots, batch_size]
        with self._on_first_stream():
            with self._restored(changed):
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
        """Copy the inputs to the graph's memory; the caller has switched gradients off."""
        for slot, value in zip(self._slots, values, strict=True):
            slot.copy_(value, non_blocking=True)

    @contextmanager
    def _on_first_stream(self) -> Iterator[None]:
        """Work on the graph's first stream, after the caller's earlier work and before its later work."""
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
    def _restored(self, changed: Sequence[torch.Tensor]) -> Iterator[None]:
        """Restore what the warm-up runs change: buffers and the random state."""
        before = [tensor.clone() for tensor in changed]
        drawn = kind_of(self._device).random_state(self._device)
        try:
            yield
        finally:
            for tensor, old in zip(changed, before, strict=True):
                tensor.copy_(old)
            kind_of(self._device).set_random_state(self._device, drawn)
